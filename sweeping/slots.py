"""How many runs train side by side here, and what of the machine each gets; torch only where there is a GPU driver."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from checks.devices import CPU_RANK_BYTES
from config import Config
from errors import UsageError
from hardware import core_count, free_memory_bytes, gpu_count, share_of_cores
from strategies import STRATEGIES

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The GPUs that CUDA shows a process, and torch on ROCm too."""

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Slot:
    """The place of one run."""

    told: dict[str, str] = field(default_factory=dict)
    """Environment variables."""
    cores: frozenset[int] = frozenset()
    """That it keeps to; none: all."""


def slots(configs: Sequence[Config], parallel: int | None, runs: int) -> list[Slot]:
    """The places of the runs that are made at the same time.

    Args:
        configs: of the settings, settled; the one with the most ranks decides.
        parallel: how many; None: as many as there are devices for.
        runs: that there will be at most.

    Raises:
        UsageError: the memory does not suffice for `parallel`, or the runs cannot be made at the same time.
    """
    ranks = max(int(config.devices) for config in configs)
    if any("nvme" in STRATEGIES[config.strategy].offload_optimizer for config in configs):
        # DeepSpeed (0.19.8) clears a place in --nvme_path that two runs would share (partitioned_param_swapper.py).
        if parallel not in (None, 1):
            raise UsageError(f"--parallel {parallel}: runs that offload to --nvme_path take turns, leave it out")
        parallel = 1
    if any(config.accelerator == "gpu" for config in configs):
        return _on_gpus(ranks, parallel, runs)
    return _on_cores(ranks, parallel, runs)


def _on_gpus(ranks: int, parallel: int | None, runs: int) -> list[Slot]:
    """As many GPUs for each as it has ranks; where more are asked for they share them."""
    gpus = os.environ.get(VISIBLE, ",".join(map(str, range(gpu_count())))).split(",")[: gpu_count()]
    groups = [gpus[first : first + ranks] for first in range(0, len(gpus) - ranks + 1, ranks)]
    count = min(parallel or len(groups), runs)
    return [Slot({VISIBLE: ",".join(groups[number % len(groups)])}) for number in range(count)]


def _on_cores(ranks: int, parallel: int | None, runs: int) -> list[Slot]:
    """A core for each rank, or as many as OMP_NUM_THREADS says; where there are more they are shared out evenly."""
    room = max(1, free_memory_bytes() // (ranks * CPU_RANK_BYTES))
    if parallel is not None and parallel > room:
        raise UsageError(f"--parallel {parallel}: a CPU rank takes about 1 GB, and there is room for {room} runs here")
    first = os.environ.get(THREADS, "").split(",")[0].strip()  # a list is of nested regions (OpenMP 5.2, 21.2.1)
    threads = max(1, int(first)) if first.isdecimal() else 1  # what is no number OpenMP leaves aside
    count = min(parallel or max(1, min(core_count() // (ranks * threads), room)), runs)
    if THREADS in os.environ:  # who sets it has shared the cores out himself, as for launch.py
        return [Slot()] * count
    return [Slot(cores=frozenset(share_of_cores(number, count))) for number in range(count)]
