"""Forms the process group of a run, sets the time limits of its collectives, and exchanges values between ranks."""

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
from torch.distributed import distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from cifar_zero.config.run import Run
from cifar_zero.core.console import command, say, torchrun
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.launch import rank_environment
from cifar_zero.launch.arrivals import await_ranks, open_store

T = TypeVar("T")

PATIENCE_SECONDS = 3.0
"""How long a rank polls for a file that another rank has just written, as in Lightning's is_shared_filesystem."""

START = timedelta(minutes=30)
"""Time limit for the ranks to form the process group, and after that for the collectives during data preparation. Nodes
start minutes apart, and rank 0 downloads and decodes the images while the other ranks wait."""

START_TOGETHER = timedelta(minutes=5)
"""Time limit to form the process group for ranks that start together: those of a run on one node, and torchrun's. A
shorter --timeout replaces it, down to LEAST_START. If one of torchrun's ranks fails before the rendezvous (no GPU, for
example), torchrun ends the other ranks of that node, and this limit ends the ranks of the other nodes."""

LEAST_START = timedelta(minutes=1)  # least limit for the ranks to meet: imports may take that long on a busy machine

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable that, if it is 1, makes torchrun create a new store for restarted ranks. By default (torch 2.15,
dynamic_rendezvous.py) restarted ranks find the keys of the previous start, and may connect to an address where no
process listens any more."""


@dataclass(frozen=True)
class RankInfo:
    host: str  # name of the node
    device: str  # cpu, or cuda and its number
    threads: int  # number of CPU threads that torch uses
    ranks: int  # number of ranks on the node, by this rank's launcher
    agent: str  # name of the node's torchrun process, see `rank_environment.torchrun_agent`
    job: str  # SLURM job and command, see `rank_environment.slurm_job`


def init_process_group(run: Run) -> list[RankInfo]:
    """Forms the process group of a run if it has several ranks and no group exists, and sets the time limit of its
    collectives to START or to a longer --timeout. Returns the `RankInfo` of every rank, in rank order. Every rank must
    call it. Raises UsageError if no launcher started the ranks, or if nodes have different numbers of ranks."""
    device = "cpu" if run.on_cpu else f"cuda:{rank_environment.local_rank()}"
    ranks_here = run.placement.world_size // run.placement.num_nodes
    agent, job = rank_environment.torchrun_agent(), rank_environment.slurm_job()
    info = RankInfo(socket.gethostname(), device, torch.get_num_threads(), ranks_here, agent, job)
    if run.placement.world_size == 1 or dist.is_initialized():
        return gather(info)
    if not rank_environment.is_rank():
        starts, nodes = command("train", "--devices", ranks_here), run.placement.num_nodes
        if nodes > 1:
            starts = torchrun("train", nodes, ranks_here)
        raise UsageError(
            f"{nodes} x {ranks_here} ranks (--num_nodes, --devices): one process is one rank: use --devices 1 on one "
            f"node, or start the ranks with {starts}"
        )
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank_environment.global_rank() == 0 and shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        say(f"warning: ranks that torchrun restarts may fail to connect: start torchrun with {OWN_STORE}=1")
    timeout = timedelta(seconds=run.placement.timeout)
    together = rank_environment.by_torchrun() or run.placement.num_nodes == 1
    connect(run.on_cpu, max(min(timeout, START_TOGETHER), LEAST_START) if together else START)
    rank_infos = gather(info)
    check_ranks_per_node(rank_infos)
    _set_timeout(max(timeout, START))
    return rank_infos


def check_ranks_per_node(rank_infos: Sequence[RankInfo]) -> None:
    """Raises UsageError if the launcher started different numbers of ranks on the nodes, which Lightning and DeepSpeed
    do not support."""
    host_of = {info.ranks: info.host for info in rank_infos}
    if len(host_of) > 1:
        numbers = ", ".join(f"{ranks} on {host}" for ranks, host in sorted(host_of.items()))
        raise UsageError(f"the nodes have different numbers of ranks ({numbers}): start the same number on each node")


def connect(on_cpu: bool, patience: timedelta = START_TOGETHER) -> None:
    """Forms the default process group of all ranks, with gloo if `on_cpu` is set, else with NCCL, and selects this
    rank's GPU. `patience` is also the time limit of the group's collectives. If some ranks do not connect within
    `patience`, rank 0 raises RunError, which names them."""
    gpu = None if on_cpu else torch.device(f"cuda:{rank_environment.local_rank()}")
    if gpu is not None:
        torch.cuda.set_device(gpu)
    rank, ranks = rank_environment.global_rank(), int(os.environ["WORLD_SIZE"])
    store = open_store(patience)
    await_ranks(store, rank, ranks, patience)
    backend = "gloo" if on_cpu else "nccl"
    # Without device_id torch (2.15) guesses the GPU of a barrier from the rank, and warns.
    dist.init_process_group(backend, timeout=patience, store=store, rank=rank, world_size=ranks, device_id=gpu)


def await_training(run: Run) -> None:
    """Waits until every rank has called this function, and then sets the time limit of collectives to --timeout. Does
    nothing with one rank."""
    if run.placement.world_size > 1:
        dist.barrier()
        _set_timeout(timedelta(seconds=run.placement.timeout))


def _set_timeout(limit: timedelta) -> None:
    """Sets the time limit of the default process group, and of groups that Lightning and DeepSpeed create later. The
    strategies' own `timeout` does not reach those groups, because DeepSpeed 0.19.8 passes none to
    torch.distributed.new_group."""
    set_pg_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # before torch 2.15
    set_pg_timeout(limit)
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):  # private names in torch 2.15
        setattr(distributed_c10d, default, limit)


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the `value` of each rank of a group, by default of all ranks, in rank order. Every rank of the group must
    call it. Values are pickled."""
    if not _has_others():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def call_on_rank_0(ask: Callable[[], T]) -> T:
    """Calls `ask` on rank 0 and returns its result, which is pickled, on every rank. Every rank must call it. If `ask`
    raises UsageError, every rank raises it. Any other exception is raised on rank 0, and RunError on the other
    ranks."""
    answer: list[Any] = [None]
    failure: Exception | None = None
    if not _has_others() or dist.get_rank() == 0:
        try:
            answer = [ask()]
        except Exception as error:  # raised here, it would leave the other ranks waiting
            failure, answer = error, [error]
            if not isinstance(error, UsageError):
                answer = [RunError(f"rank 0: {type(error).__name__}: {error}")]
    if _has_others():
        dist.broadcast_object_list(answer)
    if isinstance(answer[0], (UsageError, RunError)):
        raise failure or answer[0]
    return answer[0]


def ranks_on_another_disk(folder: Path | None) -> list[int]:
    """Returns, on every rank, the ranks that do not see within PATIENCE_SECONDS a file that rank 0 writes into `folder`
    and then removes. Every rank must call it. `folder` is None on all ranks except rank 0."""
    file = call_on_rank_0(lambda: folder and folder / f".shared-{uuid.uuid4().hex}")
    assert file is not None
    call_on_rank_0(file.touch)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (seen := file.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    seen_by = gather(seen)
    if folder is not None:
        file.unlink()
    return [rank for rank, seen in enumerate(seen_by) if not seen]


def average_over_ranks(values: Sequence[Tensor]) -> None:
    """Replaces each tensor by its mean over all ranks, in place. The mean is computed in float32, or in float64 if one
    of the tensors is float64. Every rank must call it."""
    if not values or not _has_others():
        return
    wide = [value.to(torch.promote_types(value.dtype, torch.float32)).flatten() for value in values]
    flat = torch.cat(wide)  # one reduction for all tensors
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for value, mean in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(mean.view_as(value))


def _has_others() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
