"""Trains a recipe of this program, recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from cifar_zero.comparison.perturbed import perturbed
from cifar_zero.comparison.recorded.record import Record
from cifar_zero.comparison.recorded.recording import Recording
from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.training import build
from cifar_zero.training.callbacks.averaging import BatchNormStatistics
from cifar_zero.training.callbacks.heartbeat import Heartbeat
from cifar_zero.training.resolve import resolve


def train_recipe(
    flags: list[str],
    sign: int,
    folder: Path,
    module_class: Callable[[], Any],
    datamodule_class: Callable[[], Any],
) -> Record:
    """Trains a run as one rank, without output of any kind; returns its record, on every rank.

    Args:
        flags: of train.py.
        sign: 1 or -1: changes its initial weights by about one rounding error in this direction; 0: not.
        folder: Lightning's for what it may write.
        module_class: imports and returns CIFARModule.
        datamodule_class: imports and returns CIFARDataModule.
    """
    run, module = resolve(command_line.parse(flags)), module_class()
    if sign:
        module = perturbed(module, run.config.precision, run.config.accelerator, sign)
    recording = Recording(run.config.max_steps)
    trainer = quiet_trainer(run, folder, [BatchNormStatistics(), recording])
    trainer.fit(module(run.config, run.num_classes, None), datamodule=datamodule_class()(run.config))
    return recording.record


def quiet_trainer(run: Run, folder: Path, callbacks: list[Callback], elements: int = 0, **more: Any) -> Trainer:
    """Returns a Trainer that neither validates nor writes anything; `elements` are those of a model that is not the
    run's, and `more` are options of Lightning's Trainer."""
    quiet = {"enable_checkpointing": False, "limit_val_batches": 0, "logger": False, "default_root_dir": folder}
    run = replace(run, config=replace(run.config, trainer={**run.config.trainer, **quiet, **more}))
    return build.trainer(run, None, [Heartbeat(), *callbacks], elements)
