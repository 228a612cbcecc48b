"""A signal ends training between two steps; the checkpoint saved then resumes at the next step."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from cifar_zero.config.flags import Config
from cifar_zero.training.callbacks.interrupt import Interrupt
from cifar_zero.training.callbacks.last_checkpoint import LastCheckpoint

CONFIG = Config(epochs=3, batch_size=8)
STEPS = 4
"""Steps of an epoch, which has 32 images."""


class Terminate(Callback):
    """Sends SIGTERM in a step."""

    def __init__(self, step: int):
        self._step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
@pytest.mark.parametrize(
    ("step", "kept"),
    [
        pytest.param(2, {"last.ckpt"}, id="in mid-epoch"),
        pytest.param(STEPS, {"last.ckpt", "best.ckpt"}, id="in the last step of an epoch"),
    ],
)
def test_no_checkpoint_claims_that_an_interrupted_epoch_ended(
    step: int, kept: set[str], fit: Callable[..., Any], tmp_path: Path
):
    """A checkpoint of a validation after the stop would claim it, and a resumed run takes the newest checkpoint."""
    folder = tmp_path / "kept"
    last, best = LastCheckpoint(folder / "last.ckpt"), ModelCheckpoint(folder, "best", monitor="val/acc", mode="max")
    stopped = fit(CONFIG, STEPS * 8, Terminate(step), Interrupt(), last, best, enable_checkpointing=True)
    assert stopped.observer(Interrupt).signal == signal.SIGTERM
    assert stopped.trainer.global_step == step
    assert {path.name for path in folder.iterdir()} == kept
