"""What the ranks of a run tell each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from errors import UsageError

T = TypeVar("T")


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The `value` of every rank of the group, all ranks by default, in their order. Each of them must call it; values
    are pickled."""
    if not _has_others():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values  # pyright: ignore[reportReturnType]


def by_rank_0(ask: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank. Each of them must call it.

    Raises:
        UsageError: rank 0 has; raised on every rank.
    """
    found: T | UsageError | None = None
    if not _has_others() or dist.get_rank() == 0:
        try:
            found = ask()
        except UsageError as error:
            found = error
    told = gather(found)[0]
    if isinstance(told, UsageError):
        raise told
    return told  # pyright: ignore[reportReturnType]


def average_over_ranks(values: Sequence[Tensor]) -> None:
    """Puts the mean over all ranks, taken in float32, in place of each tensor. Each rank must call it."""
    if not values or not _has_others():
        return
    flat = torch.cat([value.float().flatten() for value in values])  # so that one reduction serves all
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for value, mean in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(mean.view_as(value))


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
