"""Trains the cases of one number of ranks one after the other in the same ranks, since starting ranks takes seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cifar_zero.comparison.perturbed import perturbed
from cifar_zero.comparison.recorded.record import Record, record_file, save
from cifar_zero.comparison.recorded.recording import Recording
from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.core.console import quieten
from cifar_zero.core.hardware import gpu_count
from cifar_zero.launch import local_launcher, rank_environment
from cifar_zero.training import build
from cifar_zero.training.callbacks.averaging import BatchNormStatistics
from cifar_zero.training.callbacks.heartbeat import Heartbeat
from cifar_zero.training.resolve import resolve


def train_jobs(file: Path, module_class: Callable[[], Any], datamodule_class: Callable[[], Any]) -> int:
    """Trains the jobs of a file, in ranks that it starts if there are several; rank 0 writes their records.

    Args:
        file: JSON: the number of ranks, and of each job its number, flags of train.py and whether it is perturbed.
        module_class: imports and returns CIFARModule.
        datamodule_class: imports and returns CIFARDataModule.

    Returns:
        The exit code.
    """
    work = json.loads(file.read_text())
    if work["ranks"] > 1 and not rank_environment.is_rank():
        return local_launcher.run(work["ranks"], on_cpu=gpu_count() == 0)
    quieten()
    environment, rank = dict(os.environ), rank_environment.global_rank()
    for job in work["jobs"]:
        os.environ.update(environment)  # Lightning removes WORLD_SIZE at the end of a training
        run, module = resolve(command_line.parse(job["flags"])), module_class()
        if job["perturbed"]:
            module = perturbed(module, run.config.precision, run.config.accelerator)
        record = train(run, module, datamodule_class(), file.parent)
        if rank == 0:
            save(record, record_file(file.parent, job["number"]))
    return 0


def train(run: Run, module_class: Any, datamodule_class: Callable[..., Any], folder: Path) -> Record:
    """Trains a run without output of any kind; returns its record, on every rank."""
    quiet = {"enable_checkpointing": False, "limit_val_batches": 0, "logger": False, "default_root_dir": folder}
    run = replace(run, config=replace(run.config, trainer={**run.config.trainer, **quiet}))
    recording = Recording(run.config.max_steps)
    trainer = build.trainer(run, None, [Heartbeat(), BatchNormStatistics(), recording])
    module = module_class(run.config, run.num_classes, None)
    trainer.fit(module, datamodule=datamodule_class(run.config))
    return recording.record
