"""Trains the jobs of a file one after the other, as one rank, with every step checked; `pool` starts the ranks."""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from cifar_zero.comparison import resuming
from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.core.atomic import write_json
from cifar_zero.core.console import quieten
from cifar_zero.core.hardware import gpu_count
from cifar_zero.launch import rank_environment
from cifar_zero.step_check.verdict import Verdict
from cifar_zero.strategies import hooks_of
from cifar_zero.training import DATAMODULE, MODULE, build, starting
from cifar_zero.training.callbacks.averaging import Averaging, BatchNormStatistics
from cifar_zero.training.callbacks.checkpoint import Resume
from cifar_zero.training.resolve import resolve

Train = Callable[[list[str], Path], Verdict]
"""Trains a case, given by its flags, with a folder for temporary files; returns its verdict, on every rank."""


def train_recipe(flags: list[str], folder: Path) -> Verdict:
    """Trains a run of this program, given by train's flags, as one rank, without output."""
    check, checkpoint, flags = resuming.of_job(flags, folder)
    if checkpoint is not None:
        flags = [*flags, "--resume", str(checkpoint)]
    run = resolve(command_line.parse(flags))
    images = starting.check_checkpoint(run)
    callbacks: list[Callback] = [BatchNormStatistics(), Resume()]
    if run.recipe.ema:
        callbacks.append(Averaging(run.recipe.ema, run.recipe.swa_from))
    trainer = quiet_trainer(run, folder, [*callbacks, check])
    module, datamodule = resolve_name(MODULE)(run, run.num_classes, None), resolve_name(DATAMODULE)(run, images)
    trainer.fit(module, datamodule=datamodule, ckpt_path=checkpoint)
    steps = run.recipe.max_steps - check.resumed_at
    if len(check.verdict.steps) < steps:
        check.verdict.note(f"{steps - len(check.verdict.steps)} of {steps} steps")
    return check.verdict


def quiet_trainer(run: Run, folder: Path, callbacks: Sequence[Any], elements: int = 0, **more: Any) -> Trainer:
    """Returns a Trainer that neither validates nor writes anything; `elements` are those of a model that is not the
    run's, and `more` are options of Lightning's Trainer."""
    quiet = {"enable_checkpointing": False, "limit_val_batches": 0, "logger": False, "default_root_dir": folder}
    run = run.changed(trainer={**run.recipe.trainer, **quiet, **more})
    return build.trainer(run, None, [*callbacks, Free()], elements)


class Free(Callback):
    """Frees an engine with all its tensors, before the next training in this process."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        hooks_of(trainer.strategy).free()


def train_all(jobs: Mapping[str, list[str]], train: Train, folder: Path) -> None:
    """Trains jobs, given by their flags, and on rank 0 writes the verdict of each to the path that it is given by."""
    quieten()
    gc.freeze()  # ZeRO 3 (DeepSpeed 0.19.8, defragment) collects garbage at each start: 0.35 s with all imports
    if gpu_count() == 0:
        torch.set_num_threads(1)  # enough for these models, and threads wait for one another on a busy machine
    environment, rank = dict(os.environ), rank_environment.global_rank()
    for file, flags in jobs.items():
        os.environ.update(environment)  # Lightning removes WORLD_SIZE at the end of a training
        # With TF32 the bounds of a float32 case would be a thousand times as wide on a GPU (torch, CUDA semantics).
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
            verdict = train(flags, folder)
        if rank == 0:
            write_json(Path(file), verdict.as_dict())
