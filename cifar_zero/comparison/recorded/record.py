"""What a recorded training did at each optimizer step, and the ranks that train and record a file of jobs."""

import gc
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from cifar_zero.core import atomic
from cifar_zero.core.console import quieten
from cifar_zero.core.hardware import gpu_count
from cifar_zero.launch import local_launcher, rank_environment

Tensors = dict[str, Tensor]
"""Tensors by the names of the plain model, on the CPU; float32 but for weights of another type."""


@dataclass
class Record:
    """A training of some steps; each list has an entry per optimizer step."""

    losses: list[float] = field(default_factory=list)  # mean over the micro-batches and the ranks
    rates: list[list[float]] = field(default_factory=list)  # learning rate of each parameter group
    gradients: list[Tensors] = field(default_factory=list)  # of the first steps, whole, before clipping; zeros for none
    weights: list[Tensors] = field(default_factory=list)  # at the start and after each of the first steps, frozen too


Train = Callable[[list[str], int, Path], Record]
"""Trains a job: its flags, how it is perturbed (see `Job`), and the folder of the records."""


def record_file(folder: Path, number: int) -> Path:
    return folder / f"{number}.pt"


@lru_cache(maxsize=8)
def load(file: Path) -> Record:
    """Reads a record, once for cases that follow one another and share a reference."""
    return Record(**torch.load(file, weights_only=True))


def train_jobs(file: Path, train: Train) -> int:
    """Trains the jobs of a file one after the other in the same ranks, which it starts if there are several: that takes
    seconds. Rank 0 writes their records. Returns the exit code. `file` is JSON: the number of ranks, and of each job
    its number, its flags and how it is perturbed."""
    work = json.loads(file.read_text())
    if work["ranks"] > 1 and not rank_environment.is_rank():
        return local_launcher.run(work["ranks"], on_cpu=gpu_count() == 0)
    quieten()
    gc.freeze()  # ZeRO 3 (DeepSpeed 0.19.8, defragment) collects garbage at each start: 0.35 s with all imports
    environment, rank = dict(os.environ), rank_environment.global_rank()
    for job in work["jobs"]:
        os.environ.update(environment)  # Lightning removes WORLD_SIZE at the end of a training
        # With TF32 the bounds of a float32 case would be a thousand times as wide on a GPU (torch, CUDA semantics).
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
            record = train(job["flags"], job["perturbed"], file.parent)
        if rank == 0:
            target = record_file(file.parent, job["number"])
            torch.save(vars(record), atomic.staged(target))
            atomic.staged(target).replace(target)  # the file appears when it is whole
    return 0
