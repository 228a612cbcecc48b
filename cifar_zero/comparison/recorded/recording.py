"""Trains, and records what happens at each optimizer step: loss, learning rates, gradients and weights."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from cifar_zero.comparison.perturbed import perturbed
from cifar_zero.comparison.recorded.record import Record
from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.strategies import hooks_of
from cifar_zero.training import DATAMODULE, MODULE, build
from cifar_zero.training.callbacks.averaging import BatchNormStatistics
from cifar_zero.training.resolve import resolve

BUDGET = 2**23
"""Largest number of elements of recorded weights (32 MiB), and of gradients; but at least those of LEAST_STEPS."""

LEAST_STEPS = 2
"""The first step shows a wrong gradient, the second a gradient that was not cleared and a state that was not kept."""


class Recording(Callback):
    """Fills a record on every rank, with gradients and weights of the first `steps`, fewer for a large model."""

    def __init__(self, steps: int):
        self.record = Record()
        self._steps = steps
        self._losses: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the initial weights, as the strategy holds them."""
        start = hooks_of(trainer.strategy).weights(pl_module)
        elements = sum(tensor.numel() for tensor in start.values())
        self._steps = min(self._steps, max(LEAST_STEPS, BUDGET // elements))
        self.record.weights.append(start)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Records the gradients: summed over micro-batches and ranks, not yet clipped."""
        hooks = hooks_of(trainer.strategy)
        if not hooks.ends_step():
            return
        self.record.rates.append([float(group["lr"]) for group in optimizer.param_groups])
        if len(self.record.gradients) < self._steps:
            self.record.gradients.append(hooks.gradients(pl_module))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self._losses.append(outputs["loss"].float())
        if len(self.record.weights) <= min(len(self.record.rates), self._steps):  # the initial ones have no rates
            self.record.weights.append(hooks_of(trainer.strategy).weights(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning (2.6.6) hands out the loss divided by accumulate_grad_batches: the sum of a step's is its mean.
        by_step = torch.stack(self._losses).view(-1, trainer.accumulate_grad_batches).sum(dim=1)
        self.record.losses = trainer.strategy.reduce(by_step, reduce_op="mean").tolist()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Frees an engine with all its tensors, before the next training in this process."""
        hooks_of(trainer.strategy).free()


class Reseed(Callback):
    """Seeds all random numbers before each epoch and micro-batch: a strategy may draw some of its own in between."""

    def __init__(self, seed: int):
        self._seed = seed

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seeds, before the loaders are made: the same on all ranks, which may split the images at random."""
        seed_everything(self._seed, verbose=False)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seed_everything(self._seed + trainer.current_epoch, verbose=False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        seed_everything(self._seed + 1000 * (batch_idx + 1) + trainer.global_rank, verbose=False)


def train_recipe(flags: list[str], sign: int, folder: Path) -> Record:
    """Trains a run, given by train's flags, as one rank, without output; returns its record, on every rank. `sign`
    is that of its perturbation, 0 for none."""
    run = resolve(command_line.parse(flags))
    module_class = resolve_name(MODULE)
    if sign:
        module_class = perturbed(run.placement.precision, run.placement.accelerator, sign)
    recording = Recording(run.recipe.max_steps)
    trainer = quiet_trainer(run, folder, [BatchNormStatistics(), recording])
    trainer.fit(module_class(run, run.num_classes, None), datamodule=resolve_name(DATAMODULE)(run))
    return recording.record


def quiet_trainer(run: Run, folder: Path, callbacks: list[Callback], elements: int = 0, **more: Any) -> Trainer:
    """Returns a Trainer that neither validates nor writes anything; `elements` are those of a model that is not the
    run's, and `more` are options of Lightning's Trainer."""
    quiet = {"enable_checkpointing": False, "limit_val_batches": 0, "logger": False, "default_root_dir": folder}
    run = run.changed(trainer={**run.recipe.trainer, **quiet, **more})
    return build.trainer(run, None, callbacks, elements)
