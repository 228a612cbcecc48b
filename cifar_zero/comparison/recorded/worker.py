"""Trains the jobs of one number of ranks one after the other in the same ranks, since starting ranks takes seconds."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path

from cifar_zero.comparison.recorded.record import Record, record_file, save
from cifar_zero.core.console import quieten
from cifar_zero.core.hardware import gpu_count
from cifar_zero.launch import local_launcher, rank_environment

Train = Callable[[list[str], int, Path], Record]
"""Trains a job: its flags, how it is perturbed (see `Job`), and the folder of the records."""


def train_jobs(file: Path, train: Train) -> int:
    """Trains the jobs of a file, in ranks that it starts if there are several; rank 0 writes their records.

    Args:
        file: JSON: the number of ranks, and of each job its number, its flags and how it is perturbed.
        train: trains one job as one rank.

    Returns:
        The exit code.
    """
    work = json.loads(file.read_text())
    if work["ranks"] > 1 and not rank_environment.is_rank():
        return local_launcher.run(work["ranks"], on_cpu=gpu_count() == 0)
    quieten()
    gc.freeze()  # ZeRO 3 (DeepSpeed 0.19.8, defragment) collects garbage at each start: 0.35 s with all imports
    environment, rank = dict(os.environ), rank_environment.global_rank()
    for job in work["jobs"]:
        os.environ.update(environment)  # Lightning removes WORLD_SIZE at the end of a training
        record = train(job["flags"], job["perturbed"], file.parent)
        if rank == 0:
            save(record, record_file(file.parent, job["number"]))
    return 0
