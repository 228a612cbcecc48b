"""How the ranks of a run find each other, and how long they wait for each other."""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import interface
import launch
import launchers
from errors import RunError
from ranks import gather

if TYPE_CHECKING:
    from config import Config


START = timedelta(minutes=30)
"""How long ranks wait for each other at the start, as torch does over gloo: machines come up minutes apart. And, at
least, until the images are there: rank 0 downloads and decodes them while the others wait."""

AFTER_AGENTS = timedelta(minutes=5)
"""How long ranks of torchrun wait to meet: its agents have met, so what is left is the slowest import. A rank that ends
before it comes, for want of a GPU say, leaves the others of its machine to torchrun, those elsewhere to this limit."""


KEY = "cifar-zero/meeting"
"""Begins the keys with which ranks of torchrun agree, in the store of its agents."""

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    rank: int
    host: str
    address: str
    """Of the interface through which the machines reach each other; empty where all ranks are on one machine."""
    local_rank: int
    device: str
    threads: int
    """Of torch, for operations on the CPU."""
    starter: str
    """What has started it, see `launchers.starter`."""


def meet(config: Config) -> list[Place]:
    """Starts the process group; returns where every rank is, in their order. `limit` ends the beginning.

    Here and not in the strategies, so that one limit holds for whatever they do: Lightning's and DeepSpeed's own
    groups, which their `timeout` does not reach (DeepSpeed 0.19.8 hands none to torch.distributed.new_group).

    Args:
        config: of the run, settled by `checks.settle`.
    """
    if config.world_size > 1 and not dist.is_initialized():
        if config.num_nodes > 1:
            interface.settle(os.environ["MASTER_ADDR"])
        on_gpu = config.accelerator == "gpu"
        if on_gpu:
            torch.cuda.set_device(launch.local_rank())
        patience = AFTER_AGENTS if launchers.by_torchrun() else START
        where: dict[str, Any] = {}
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            rank = launch.global_rank()
            store = TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience
            )
            own = PrefixStore(agree(store, rank, config.world_size, patience), store)
            where = {"store": own, "rank": rank, "world_size": config.world_size}
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=patience, **where)
        places = gather(_place(config))
        _set_timeout(max(timedelta(seconds=config.timeout), START))
        return places
    return gather(_place(config))


def agree(store: Store, rank: int, ranks: int, patience: timedelta) -> str:
    """A prefix for the keys of this start alone, the same on all ranks.

    torchrun's agents keep their store when they start ranks anew (torch 2.15, dynamic_rendezvous.py), and torch uses
    the same keys again: a rank that was quicker than another would find the address of one that has ended, and gloo's
    `Connection refused`. So each rank asks under a name that it has drawn, and rank 0 answers until all have heard it.

    Args:
        store: of the agents.
        rank: of this process.
        ranks: how many.
        patience: how long they wait for each other.

    Raises:
        RunError: some have not come; on rank 0, which names them.
    """
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"{KEY}/asks/{rank}", mine)
        answer = f"{KEY}/answer/{mine}"
        store.wait([answer], patience)
        prefix = store.get(answer).decode()
        store.set(f"{prefix}/heard/{rank}", "")
        return prefix
    prefix, lacking = f"{KEY}/{mine}", set(range(1, ranks))
    over = time.monotonic() + patience.total_seconds()
    while lacking := {other for other in lacking if not store.check([f"{prefix}/heard/{other}"])}:
        if time.monotonic() > over:
            raise RunError(f"rank {', '.join(map(str, sorted(lacking)))} did not come within {patience}")
        for other in lacking:
            if store.check([f"{KEY}/asks/{other}"]):  # it may be an earlier one, which hears nothing any more
                store.set(f"{KEY}/answer/{store.get(f'{KEY}/asks/{other}').decode()}", prefix)
        time.sleep(POLL_SECONDS)
    return prefix


def limit(config: Config) -> None:
    """From here on, where the images are prepared and all ranks have come, they wait for each other for --timeout.

    Args:
        config: of the run.
    """
    if config.world_size > 1:
        dist.barrier()
        _set_timeout(timedelta(seconds=config.timeout))


def _set_timeout(limit: timedelta) -> None:
    """Of the group of all ranks, and of those that are made later without one, for which torch (2.15) has no public
    way to say it."""
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # before torch 2.15
    set_timeout(limit)
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, default, limit)


def _place(config: Config) -> Place:
    local_rank = launch.local_rank()
    return Place(
        rank=launch.global_rank(),
        host=socket.gethostname(),
        address=interface.address(),
        local_rank=local_rank,
        device=f"cuda:{local_rank}" if config.accelerator == "gpu" else "cpu",
        threads=torch.get_num_threads(),
        starter=launchers.starter(),
    )
