"""How the ranks of a run find each other, and how long they wait for each other from then on."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import interface
import launch
from ranks import gather

if TYPE_CHECKING:
    from config import Config


START = timedelta(minutes=30)
"""How long ranks wait for each other at the start at least, as torch does over gloo: machines come up minutes apart."""


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
    """What has started it: process and start time on its host, the same for as long as that starts it anew."""


def meet(config: Config) -> list[Place]:
    """Starts the process group; returns where every rank is, in their order.

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
        limit = timedelta(seconds=config.timeout)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=max(limit, START))
        dist.set_timeout(limit)
        # And of groups that are made later without one; torch (2.15) has no public way to say it.
        for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
            setattr(distributed_c10d, default, limit)
    return gather(_place(config))


def _place(config: Config) -> Place:
    parent = psutil.Process().parent()  # None for the first process of a container
    local_rank = launch.local_rank()
    return Place(
        rank=launch.global_rank(),
        host=socket.gethostname(),
        address=interface.address(),
        local_rank=local_rank,
        device=f"cuda:{local_rank}" if config.accelerator == "gpu" else "cpu",
        threads=torch.get_num_threads(),
        starter=f"{socket.gethostname()}:{parent.pid}:{parent.create_time()}" if parent else "",
    )
