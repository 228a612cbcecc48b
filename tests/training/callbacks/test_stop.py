"""Signals and early stopping end a training between two steps. The checkpoint that is saved there resumes at the next
step."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import make_settings
from cifar_zero.training.callbacks.checkpoint import LastCheckpoint
from cifar_zero.training.callbacks.monitors import EarlyStop
from cifar_zero.training.callbacks.stop import Interrupt
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


STUCK = make_settings(optimizer=Choice("sgd", {"lr": 0.0}), batch_size=8, epochs=9)


def test_a_resumed_run_continues_counting_with_its_own_patience(fit: Callable[..., Any]):
    stopped = fit(STUCK, 16, EarlyStop(2))
    assert stopped.trainer.current_epoch == 3  # the first validation is the best, and two more follow
    before = stopped.observer(EarlyStop).state_dict()
    for patience, epochs in ((1, 0), (2, 0), (4, 2)):
        again = EarlyStop(patience)
        again.load_state_dict(before)
        assert fit(STUCK, 16, again).trainer.current_epoch == epochs
