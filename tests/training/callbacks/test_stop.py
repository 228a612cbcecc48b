"""Signals and early stopping end a training between two steps. The checkpoint that is saved there resumes at the next
step."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from cifar_zero.config import command_line
from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import make_settings
from cifar_zero.core import exits
from cifar_zero.core.errors import RunError
from cifar_zero.training.callbacks.checkpoint import LastCheckpoint
from cifar_zero.training.callbacks.monitors import EarlyStop
from cifar_zero.training.callbacks.stop import Interrupt, reported
from cifar_zero.training.resolve import resolve
from tests.users_code.sends_signal import SendsSignal


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        pytest.param(2, {"last.ckpt"}, id="in mid-epoch"),
        pytest.param(1, {"last.ckpt", "best.ckpt"}, id="in the last step of an epoch"),
    ],
)
def test_no_checkpoint_claims_that_an_interrupted_epoch_ended(
    steps: int, kept: set[str], fit: Callable[..., Any], tmp_path: Path
):
    """The signal comes in the first of the `steps` of an epoch. If a validation followed the stop in mid-epoch, its
    checkpoint would claim that the epoch ended, and a resumed run takes the newest checkpoint."""
    folder, sender = tmp_path / "kept", SendsSignal("on_train_batch_start", signal.SIGTERM, "self")
    last, best = LastCheckpoint(folder / "last.ckpt"), ModelCheckpoint(folder, "best", monitor="val/acc", mode="max")
    config = make_settings(epochs=3, batch_size=8)
    stopped = fit(config, steps * 8, sender, Interrupt(), last, best, enable_checkpointing=True)
    assert stopped.observer(Interrupt).signal == signal.SIGTERM
    assert stopped.trainer.global_step == 1
    assert {path.name for path in folder.iterdir()} == kept


@pytest.mark.parametrize(
    ("error", "checkpoint", "said"),
    [
        (RuntimeError("Connection closed by peer"), "last.ckpt", "another rank has ended"),
        (ValueError("of the user's code"), "last.ckpt", "ValueError: of the user's code"),
        (ValueError("before a checkpoint"), "", "ValueError: before a checkpoint"),
        (RunError("the loss is NaN"), "last.ckpt", "the loss is NaN"),  # a resumed run would fail again
    ],
)
def test_a_run_that_fails_after_a_checkpoint_says_how_to_resume(
    error: Exception,
    checkpoint: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    run, trainer = resolve(command_line.parse(["--data.source", "digits", "--accelerator", "cpu"])), Any
    (tmp_path / "checkpoints").mkdir()
    if checkpoint:
        (tmp_path / "checkpoints" / checkpoint).touch()

    def main() -> int:
        with reported(trainer, run, tmp_path):  # pyright: ignore[reportArgumentType]
            raise error

    assert exits.guarded(main) == 1
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {said}")
    resumes = checkpoint != "" and not isinstance(error, RunError)
    assert [line.partition(": ")[0] for line in others] == (["resume with"] if resumes else [])


STUCK = make_settings(optimizer=Choice("sgd", {"lr": 0.0}), batch_size=8, epochs=9)


def test_a_resumed_run_continues_counting_with_its_own_patience(fit: Callable[..., Any]):
    stopped = fit(STUCK, 16, EarlyStop("val/acc", patience=2, mode="max"))
    assert stopped.trainer.current_epoch == 3  # the first validation is the best, and two more follow
    before = stopped.observer(EarlyStop).state_dict()
    for patience, epochs in ((1, 0), (2, 0), (4, 2)):
        again = EarlyStop("val/acc", patience=patience, mode="max")
        again.load_state_dict(before)
        assert fit(STUCK, 16, again).trainer.current_epoch == epochs
