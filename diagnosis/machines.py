"""What a rank tells the others about the machine that it is on."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from diagnosis.finding import Options
from diagnosis.storage import data

DRIVER = Path("/sys/module/nvidia/version")
"""Where Linux shows the version of NVIDIA's driver, if it is loaded."""

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Machine:
    """Of one rank.

    Attributes:
        rank: over all machines.
        node: of its machine, from 0 on, as the launcher counts them.
        host: the machine's name.
        device: what the rank computes on.
        versions: of what must be the same on all machines, by name.
        images: whether the images are there, in words.
        has_images: whether they are.
        clock: seconds since 1970, at a moment that is the same for all but for a collective's latency.
    """

    rank: int
    node: int
    host: str
    device: str
    versions: dict[str, str]
    images: str
    has_images: bool
    clock: float


def look(rank: int, node: int, device: str, clock: float, options: Options) -> Machine:
    """What there is to tell; the clock was read before, since looking takes each machine another time."""
    images = data(options)
    return Machine(rank, node, socket.gethostname(), device, versions(), images.found, images.status == "ok", clock)


def versions() -> dict[str, str]:
    """Of this machine, by name: Python, packages, NCCL, NVIDIA's driver, and the commit that is checked out."""
    import torch
    from torch.cuda import nccl

    from reports.summary import git_commit
    from reports.summary import versions as of_packages

    found = {name: version or "none" for name, version in of_packages().items()}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, nccl.version()))
        found["driver"] = DRIVER.read_text().strip() if DRIVER.is_file() else "unknown"
    found["commit"] = git_commit(REPOSITORY) or "unknown"
    return found


def device_name(local_rank: int, on_gpu: bool) -> str:
    """Of a rank, for people."""
    if not on_gpu:
        from hardware import cpu_name

        return f"{cpu_name()}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else '?'} cores"
    import torch

    return f"cuda:{local_rank} {torch.cuda.get_device_name(local_rank)}"
