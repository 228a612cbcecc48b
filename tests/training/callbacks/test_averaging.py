"""Compares averaged weights with averages that are computed step by step, on one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from cifar_module import CIFARModule
from cifar_zero.checkpoints.read import read
from cifar_zero.checkpoints.zero_folder import AVERAGE
from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import make_settings
from cifar_zero.training.callbacks.averaging import Averaging, averaged_tensors
from tests.support.helpers import largest_difference

LR = Choice("sgd", {"lr": 0.05})
STEPS = 8  # an epoch: 64 images in batches of 8


class WithBatchNorm(CIFARModule):
    """A model with batch norm statistics, and dropout, which draws random numbers in training."""

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            convolution, head = nn.Conv2d(3, 4, 5, stride=4), nn.Linear(196, 10)
            self.net = nn.Sequential(convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), head)


class Recorder(Callback):
    """Keeps the weights after each step, and the weights that a validation uses."""

    def __init__(self) -> None:
        self.trained: list[dict[str, Tensor]] = []
        self.validated: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return
        self.trained.append(copy(averaged_tensors(pl_module, self.trained[-1] if self.trained else ())))

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.validated = copy(averaged_tensors(pl_module, self.trained[-1]))


class Freezing(Callback):
    """Trains the bias of the convolution not in the first epoch, and its weight in no other epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        weight, bias = pl_module.net[0].parameters()
        weight.requires_grad, bias.requires_grad = trainer.current_epoch == 0, trainer.current_epoch > 0


def copy(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}


@pytest.mark.parametrize("freezing", [[], [Freezing()]], ids=["plain", "freezing"])
def test_exponential_average(freezing: list[Callback], fit: Callable[..., Any], tmp_path: Path):
    """The first 1 / (1 - 0.8) = 5 steps count equally. Each later step has weight 0.2."""
    config, recorder = make_settings(optimizer=LR, batch_size=8, accumulate=2, epochs=2), Recorder()
    done = fit(config, 8 * STEPS, Averaging(0.8), recorder, *freezing, module_class=WithBatchNorm)
    assert len(recorder.trained) == 2 * STEPS
    average: dict[str, Tensor] = {}
    for count, newest in enumerate(recorder.trained, start=1):
        before = newest | average  # a parameter that is trained only later joins with its value
        average = {name: before[name].lerp(value, max(1 - 0.8, 1 / count)) for name, value in newest.items()}
    assert largest_difference(recorder.validated, average) == 0
    assert largest_difference(average, recorder.trained[-1]) > 1e-3
    # The training continues with the trained weights.
    assert largest_difference(averaged_tensors(done.module, average), recorder.trained[-1]) == 0
    done.trainer.save_checkpoint(tmp_path / "saved.ckpt")
    assert largest_difference(read(tmp_path / "saved.ckpt")[AVERAGE]["weights"], average) == 0
    resumed = Averaging(0.8)
    fit(config, 8 * STEPS, resumed, ckpt_path=tmp_path / "saved.ckpt", module_class=WithBatchNorm)
    assert largest_difference(resumed._averages, average) == 0
