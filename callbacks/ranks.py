"""What the ranks of a run tell each other."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The `value` of every rank of the group, all ranks by default, in their order. Each of them must call it; values
    are pickled."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values  # pyright: ignore[reportReturnType]
