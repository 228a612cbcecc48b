"""What the ranks of a run tell each other."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """The `value` of every rank, in the order of the ranks. Every rank must call it; values are pickled."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # pyright: ignore[reportReturnType]
