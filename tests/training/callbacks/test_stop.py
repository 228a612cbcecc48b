"""Signals and early stopping end a training between two steps; the checkpoint saved then resumes at the next step."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from cifar_zero.config import command_line
from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import Consent, make_settings
from cifar_zero.core.console import command
from cifar_zero.core.errors import Stopped
from cifar_zero.training.callbacks.checkpoint import LastCheckpoint
from cifar_zero.training.callbacks.monitors import EarlyStop
from cifar_zero.training.callbacks.stop import Interrupt, reported
from cifar_zero.training.resolve import resolve

CONFIG = make_settings(epochs=3, batch_size=8)
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


STUCK = make_settings(optimizer=Choice("sgd", {"lr": 0.0}), batch_size=8, epochs=9)


def test_training_ends_after_patience_validations_and_prints_it(
    fit: Callable[..., Any], capfd: pytest.CaptureFixture[str]
):
    done = fit(STUCK, 16, EarlyStop(2))
    assert done.trainer.current_epoch == 3  # the first one is the best
    accuracy = done.module.val_metrics.overall()["acc"]
    message = f"early stopping after epoch 3: val/acc has not improved on {accuracy:.4g} in 2 validations"
    assert message in capfd.readouterr().err


def test_a_resumed_run_continues_counting_with_its_own_patience(fit: Callable[..., Any]):
    before = fit(STUCK, 16, EarlyStop(2)).observer(EarlyStop).state_dict()
    for patience, epochs in ((1, 0), (2, 0), (4, 2)):
        again = EarlyStop(patience)
        again.load_state_dict(before)
        assert fit(STUCK, 16, again).trainer.current_epoch == epochs


def test_a_run_that_ends_before_its_first_validation(fit: Callable[..., Any]):
    done = fit(STUCK.changed(max_steps=1), 16, EarlyStop(2))
    assert done.trainer.global_step == 1
    assert done.observer(EarlyStop).wait_count == 0


def test_a_better_accuracy_resets_the_count():
    again = EarlyStop(2)
    for accuracy, stop in ((0.5, False), (0.5, False), (0.6, False), (0.4, False), (0.6, True)):
        assert again._evaluate_stopping_criteria(torch.tensor(accuracy))[0] is stop


@pytest.mark.parametrize("saved", [False, True])
def test_ctrl_c_twice_says_that_nothing_was_saved_and_what_can_be_resumed(
    saved: bool, fit: Callable[..., Any], tmp_path: Path
):
    """With the user's own code, which only the command line may name, in the command."""
    run_dir, flags = tmp_path / "mine" / "version_0", ["--trainer.callbacks", "a.B"]
    if saved:
        (run_dir / "checkpoints").mkdir(parents=True)
        (run_dir / "checkpoints" / "last.ckpt").touch()
    asked = command_line.parse(["--data.source", "digits", "--accelerator", "cpu"])
    run = resolve(replace(asked, consent=Consent(True, tuple(flags))))
    done = fit(CONFIG.changed(max_steps=2), 16, Interrupt())
    done.observer(Interrupt).has_ended = False  # as in a step
    with pytest.raises(Stopped) as stop, reported(done.trainer, run, run_dir):
        raise Stopped(signal.SIGINT)
    earlier = f"; resume an earlier step with: {command('train')} --resume {run_dir} --trainer.callbacks a.B --trust"
    assert str(stop.value) == "stopped at step 2, NOT saved, because Ctrl-C came twice" + earlier * saved
