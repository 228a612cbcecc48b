"""The learning-rate range test of Smith 2017, "Cyclical Learning Rates for Training Neural Networks": the loss under
ever larger learning rates."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from cifar_zero.reports.learning_rate import draw_range_test

FIND_LR_STEPS = 200
"""Optimizer steps of a range test. Lightning's and fastai's finders take 100, in which the tutorial's network, which
begins on a plateau, learns nothing under SGD."""

BETA = 0.9
"""Of the running mean of the losses: over about ten steps. Lightning and fastai take 0.98, and so 50 steps: the mean
then falls late, and the suggestion is too large."""

SETTLING_STEPS = 10
"""At the beginning, whose running mean is of few losses yet; Lightning's finder leaves out as many."""

SPANS = 20
"""Of a range test: a fall is looked for over a twentieth of the steps, as between two of them there is much chance. Its
beginning counts, which makes up for the lag of the running mean."""

LEAST_FALL = 0.02
"""Share of the loss by which it must have fallen; else what looks like a fall is the noise of the batches."""

DIVERGED = 4.0
"""Times the least running mean: from there on the run has diverged, as Lightning and fastai have it."""


class LearningRateFinder(Callback):
    """Draws the losses of a run under the schedule `range_test` and prints the rate at which they fell most steeply.

    Lightning's own finder (2.6.6) puts a scheduler of its own in place of the module's for a while and then loads a
    checkpoint to undo the steps. Here the test is a run of its own, under any strategy: there is nothing to undo.

    Args:
        run_dir: the run folder, on rank 0.
    """

    def __init__(self, run_dir: Path | None):
        self._run_dir = run_dir
        self._losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keeps a micro-batch's loss, on the device."""
        self._losses.append(outputs["loss"])

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Draws and prints, on rank 0."""
        # Lightning (2.6.6) hands out the loss divided by accumulate_grad_batches: the sum of a step's is its mean.
        by_step = torch.stack(self._losses).view(-1, trainer.accumulate_grad_batches).sum(dim=1)
        losses = trainer.strategy.reduce(by_step, reduce_op="mean").tolist()
        if self._run_dir is None:
            return
        rates = [pl_module.schedule.rate(step, pl_module.optimizer.lr) for step in range(len(losses))]
        smooth = running_mean(losses)
        suggestion = steepest_fall(rates, smooth)
        file = self._run_dir / "lr_find.png"
        draw_range_test(rates, losses, smooth, suggestion, file)
        if suggestion is None:
            print(f"the loss fell under none of the learning rates, give it more --max_steps: {file}")
        else:
            print(f"the loss fell most steeply at --optimizer.lr {suggestion:.2g}: {file}")


def running_mean(losses: Sequence[float]) -> list[float]:
    """The running mean of the losses of a range test, until it diverges; its start at 0 is taken out (as in Adam)."""
    mean, means = 0.0, []
    for number, loss in enumerate(losses, start=1):
        mean = BETA * mean + (1 - BETA) * loss
        corrected = mean / (1 - BETA**number)
        if not math.isfinite(corrected) or corrected > DIVERGED * min([corrected, *means]):
            break
        means.append(corrected)
    return means


def steepest_fall(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """The learning rate from which a loss falls most over a span of the steps; None where it does not fall.

    Args:
        rates: growing by the same factor from step to step.
        losses: smoothed.
    """
    settled, span = losses[SETTLING_STEPS:], max(1, len(rates) // SPANS)
    falls = [after - before for before, after in zip(settled, settled[span:], strict=False)]
    if not falls or min(settled) > (1 - LEAST_FALL) * settled[0]:
        return None
    return rates[SETTLING_STEPS + min(range(len(falls)), key=falls.__getitem__)]
