"""How the ranks of a run meet, how long they wait for each other, and how they exchange values."""

import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from cifar_zero.config.run import Run
from cifar_zero.core.console import say
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.launch import rank_environment

T = TypeVar("T")

PATIENCE_SECONDS = 3.0
"""How long a rank looks for a file that another has just written, as Lightning's is_shared_filesystem does."""

START = timedelta(minutes=30)
"""Time limit for the ranks to meet, and then for data preparation: nodes start minutes apart, and rank 0 downloads
and decodes the images while the others wait."""

AFTER_AGENTS = timedelta(minutes=5)
"""Time limit for torchrun's ranks to meet: its agents have met already. If a rank fails before the rendezvous (no GPU,
for example), torchrun ends the other ranks of that node, and this limit ends those of the other nodes."""

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set to 1, it has torchrun give restarted ranks a new store. By default (torch 2.15, dynamic_rendezvous.py) they find
the keys of the previous start in the agents' store, and may connect to an address where nobody listens any more."""


@dataclass(frozen=True)
class Place:
    """The place of a rank."""

    rank: int  # over all nodes
    host: str  # name of the node
    local_rank: int  # on the node
    device: str  # cpu, or cuda and its number
    threads: int  # of torch on the CPU
    agent: str  # see `rank_environment.torchrun_agent`


def init_process_group(run: Run) -> list[Place]:
    """Starts the process group and returns the place of every rank, in order of rank."""
    rank, local_rank = rank_environment.global_rank(), rank_environment.local_rank()
    device = "cpu" if run.on_cpu else f"cuda:{local_rank}"
    place = Place(
        rank, socket.gethostname(), local_rank, device, torch.get_num_threads(), rank_environment.torchrun_agent()
    )
    if run.placement.world_size == 1 or dist.is_initialized():
        return gather(place)
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        say(f"warning: ranks that torchrun restarts may fail to connect: start torchrun with {OWN_STORE}=1")
    gpu = None if run.on_cpu else torch.device(device)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    patience = AFTER_AGENTS if rank_environment.by_torchrun() else START
    # Without device_id torch (2.15) guesses the GPU of a barrier from the rank, and warns.
    dist.init_process_group("gloo" if run.on_cpu else "nccl", timeout=patience, device_id=gpu)
    places = gather(place)
    _set_timeout(max(timedelta(seconds=run.placement.timeout), START))
    return places


def set_timeout(run: Run) -> None:
    """Waits for all ranks to be ready to train; from then on the time limit of a collective is --timeout."""
    if run.placement.world_size > 1:
        dist.barrier()
        _set_timeout(timedelta(seconds=run.placement.timeout))


def _set_timeout(limit: timedelta) -> None:
    """Sets the time limit of the group of all ranks, and the default of later groups: those of Lightning and DeepSpeed,
    which the strategies' own `timeout` does not reach (DeepSpeed 0.19.8 passes none to torch.distributed.new_group)."""
    set_pg_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # before torch 2.15
    set_pg_timeout(limit)
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):  # not public in torch 2.15
        setattr(distributed_c10d, default, limit)


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
