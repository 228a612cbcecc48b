"""`--find_lr`, the learning-rate range test (Smith 2017, arXiv 1506.01186); and `--reduce_on_plateau`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from cifar_zero.core.console import say
from cifar_zero.reports.figures import draw_range_test

FIND_LR_STEPS = 200
"""Optimizer steps of a range test. Lightning and fastai take 100, in which the tutorial's model, which starts on a
plateau, learns nothing under SGD."""

BETA = 0.9
"""Decay of the running mean of the losses, over about ten steps. Lightning and fastai take 0.98, or 50 steps: the
mean then falls late, and the suggestion is too large."""

SETTLING_STEPS = 10  # first steps, with few losses in the running mean, that are left out, as in Lightning's finder

SPANS = 20
"""The fall is measured over a twentieth of the steps, since between two steps it is mostly noise. The start of the
span counts, which compensates for the lag of the running mean."""


class LearningRateFinder(Callback):
    """Draws the losses of a run under the schedule `range_test`, and prints the rate at which they fell fastest.
    Lightning's finder (2.6.6) replaces the module's scheduler for a while, and then loads a checkpoint to undo the
    steps. This test is a separate run, under any strategy, with nothing to undo."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._losses.append(outputs["loss"])

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        # Lightning (2.6.6) hands out the loss divided by accumulate_grad_batches: the sum of a step's is its mean.
        by_step = torch.stack(self._losses).view(-1, trainer.accumulate_grad_batches).sum(dim=1)
        losses = trainer.strategy.reduce(by_step, reduce_op="mean").tolist()
        if not trainer.is_global_zero:
            return
        rates = [pl_module.schedule.rate(step, pl_module.optimizer.lr) for step in range(len(losses))]
        smooth = running_mean(losses)
        suggestion = steepest_fall(rates, smooth)
        file = Path(trainer.default_root_dir) / "lr_find.png"
        draw_range_test(rates, losses, smooth, suggestion, file)
        if suggestion is None:
            print(f"the loss did not fall at any learning rate; try a larger --max_steps: {file}")
        else:
            print(f"the loss fell fastest at --optimizer.lr {suggestion:.2g}: {file}")


def running_mean(losses: Sequence[float]) -> list[float]:
    """Returns the running mean of the losses until it diverges, with its start at 0 corrected as in Adam."""
    mean, means = 0.0, []
    for number, loss in enumerate(losses, start=1):
        mean = BETA * mean + (1 - BETA) * loss
        corrected = mean / (1 - BETA**number)
        if not math.isfinite(corrected) or corrected > 4.0 * min([corrected, *means]):  # as Lightning and fastai
            break
        means.append(corrected)
    return means


def steepest_fall(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Returns the learning rate from which smoothed losses fall most over a span of the steps; None if they do not."""
    settled, span = losses[SETTLING_STEPS:], max(1, len(rates) // SPANS)
    falls = [after - before for before, after in zip(settled, settled[span:], strict=False)]
    if not falls or min(settled) > 0.98 * settled[0]:  # a smaller fall is the noise of the batches
        return None
    return rates[SETTLING_STEPS + min(range(len(falls)), key=falls.__getitem__)]


FACTOR = 0.1  # torch's default, of ReduceLROnPlateau


class ReduceOnPlateau(Callback):
    """Multiplies the learning rate by FACTOR after `patience` validations in a row without a lower val/loss. torch's
    ReduceLROnPlateau takes none of DeepSpeed's optimizers, and Lightning (2.6.6) steps it after the epoch's checkpoint
    is written: a resumed run would not know that validation. The checkpoint's optimizer holds the rate."""

    def __init__(self, patience: int):
        self._patience, self._best, self._waited = patience, math.inf, 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts a validation, the same on every rank."""
        loss = trainer.callback_metrics["val/loss"].item()
        self._best, self._waited = (loss, 0) if loss < self._best else (self._best, self._waited + 1)
        if self._waited < self._patience:
            return
        self._waited = 0
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= FACTOR
        if trainer.is_global_zero:
            say(f"val/loss has not fallen below {self._best:.4f}: learning rate {group['lr']:.2g} from here on")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best, self._waited = state_dict["best"], state_dict["waited"]
