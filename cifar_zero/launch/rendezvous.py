"""How the ranks of a run meet, and how long they wait for each other."""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cifar_zero.config.run import Run
from cifar_zero.core.console import say
from cifar_zero.launch import rank_environment
from cifar_zero.launch.collectives import gather

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


def meet(run: Run) -> list[Place]:
    """Starts the process group and returns the place of every rank, in order of rank. One time limit then holds for the
    groups of Lightning and of DeepSpeed, which the strategies' own `timeout` does not reach (DeepSpeed 0.19.8 passes
    none to torch.distributed.new_group)."""
    local_rank = rank_environment.local_rank()
    place = Place(
        rank=rank_environment.global_rank(),
        host=socket.gethostname(),
        local_rank=local_rank,
        device="cpu" if run.on_cpu else f"cuda:{local_rank}",
        threads=torch.get_num_threads(),
        agent=rank_environment.torchrun_agent(),
    )
    if run.config.world_size == 1 or dist.is_initialized():
        return gather(place)
    device = None if run.on_cpu else torch.device(place.device)
    if device is not None:
        torch.cuda.set_device(device)
    _warn_of_restarts()
    patience = AFTER_AGENTS if rank_environment.by_torchrun() else START
    # Without device_id torch (2.15) guesses the GPU of a barrier from the rank, and warns.
    dist.init_process_group("gloo" if run.on_cpu else "nccl", timeout=patience, device_id=device)
    places = gather(place)
    _set_timeout(max(timedelta(seconds=run.config.timeout), START))
    return places


def limit(run: Run) -> None:
    """Waits for all ranks to be ready to train; from then on the time limit of a collective is --timeout."""
    if run.config.world_size > 1:
        dist.barrier()
        _set_timeout(timedelta(seconds=run.config.timeout))


def _warn_of_restarts() -> None:
    """Warns if torchrun may restart the ranks but was started without what its restarts need."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and rank_environment.global_rank() == 0:
        say(f"warning: ranks that torchrun restarts may fail to connect: start torchrun with {OWN_STORE}=1")


def _set_timeout(limit: timedelta) -> None:
    """Sets the time limit of the group of all ranks, and the default of later groups (not public in torch 2.15)."""
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # before torch 2.15
    set_timeout(limit)
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, default, limit)
