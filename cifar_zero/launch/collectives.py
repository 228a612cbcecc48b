"""Exchanges values between the ranks of a run."""

import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cifar_zero.core.errors import RunError, UsageError

T = TypeVar("T")

PATIENCE_SECONDS = 3.0
"""How long a rank looks for a file that another has just written, as Lightning's is_shared_filesystem does."""


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the `value` of each rank of the group (default: all), in order. Each must call it; values are pickled."""
    if not _has_others():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def by_rank_0(ask: Callable[[], T]) -> T:
    """Returns on every rank what rank 0 finds. Each rank must call it. A UsageError of rank 0 is raised on every rank;
    any other error on rank 0, and as a RunError on the others."""
    answer: list[Any] = [None]
    failure: Exception | None = None
    if not _has_others() or dist.get_rank() == 0:
        try:
            answer = [ask()]
        except UsageError as error:
            failure, answer = error, [error]
        except Exception as error:  # raised here, it would leave the other ranks waiting
            failure, answer = error, [RunError(f"rank 0: {type(error).__name__}: {error}")]
    if _has_others():
        dist.broadcast_object_list(answer)
    if isinstance(answer[0], (UsageError, RunError)):
        raise failure or answer[0]
    return answer[0]


def ranks_on_another_disk(folder: Path | None) -> list[int]:
    """Returns the ranks that cannot see what rank 0 writes into `folder`, None on the others. All ranks call it."""
    file = by_rank_0(lambda: folder and folder / f".shared-{uuid.uuid4().hex}")
    assert file is not None
    by_rank_0(file.touch)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (seen := file.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    seen_by = gather(seen)
    if folder is not None:
        file.unlink()
    return [rank for rank, seen in enumerate(seen_by) if not seen]


def average_over_ranks(values: Sequence[Tensor]) -> None:
    """Replaces each tensor by its mean over all ranks, computed in float32, or in float64 if one is of that type. Each
    rank must call it."""
    if not values or not _has_others():
        return
    wide = [value.to(torch.promote_types(value.dtype, torch.float32)).flatten() for value in values]
    flat = torch.cat(wide)  # one reduction for all
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for value, mean in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(mean.view_as(value))


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
