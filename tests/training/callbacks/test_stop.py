"""Signals and early stopping end a training between two steps. The checkpoint that is saved there resumes at the next
step."""

import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from cifar_zero.checkpoints.read import read
from cifar_zero.config import command_line
from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import make_settings
from cifar_zero.core import exits
from cifar_zero.core.errors import RunError, Stopped
from cifar_zero.training.callbacks.checkpoint import LastCheckpoint
from cifar_zero.training.callbacks.cpu_kernels import CPUKernels
from cifar_zero.training.callbacks.monitors import EarlyStop
from cifar_zero.training.callbacks.stop import Interrupt, check_saved, check_stopped, reported
from cifar_zero.training.resolve import resolve
from tests.users_code.sends_signal import SendsSignal


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
@pytest.mark.parametrize(
    ("steps", "kept", "options"),
    [
        pytest.param(2, {"last.ckpt"}, {}, id="in mid-epoch"),
        pytest.param(1, {"last.ckpt", "best.ckpt"}, {}, id="in the last step of an epoch"),
        pytest.param(2, {"last.ckpt"}, {"min_epochs": 3}, id="before the least number of epochs"),
        pytest.param(2, {"last.ckpt"}, {"min_steps": 5}, id="before the least number of steps"),
    ],
)
def test_no_checkpoint_claims_that_an_interrupted_epoch_ended(
    steps: int, kept: set[str], options: dict[str, int], fit: Callable[..., Any], tmp_path: Path
):
    """The signal comes in the first of the `steps` of an epoch. If a validation followed the stop in mid-epoch, its
    checkpoint would claim that the epoch ended, and a resumed run takes the newest checkpoint."""
    folder, sender = tmp_path / "kept", SendsSignal("on_train_batch_start", signal.SIGTERM, "self")
    last, best = LastCheckpoint(folder / "last.ckpt"), ModelCheckpoint(folder, "best", monitor="val/acc", mode="max")
    config = make_settings(epochs=3, batch_size=8)
    stopped = fit(config, steps * 8, sender, Interrupt(), last, best, enable_checkpointing=True, **options)
    assert stopped.observer(Interrupt).signal == signal.SIGTERM
    assert stopped.trainer.global_step == 1
    assert {path.name for path in folder.iterdir()} == kept


class AsksToStop(Callback):
    """Asks once to stop, in the given call of a hook, and records the steps that are saved."""

    def __init__(self, hook: str, number: int):
        def ask(trainer: Any, *_: Any) -> None:
            self.calls += 1
            if self.calls == number:
                trainer.should_stop = True

        self.calls, self.saved = 0, []
        setattr(self, hook, ask)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.saved.append(trainer.global_step)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("hook", "number", "options", "step"),
    [
        pytest.param("on_train_batch_end", 3, {}, 2, id="in mid-step"),
        pytest.param("on_validation_end", 2, {"val_check_interval": 2}, 2, id="after a validation"),
        pytest.param("on_train_batch_end", 2, {"min_steps": 6}, 6, id="before the least number of steps"),
    ],
)
def test_a_stop_in_mid_epoch_is_saved_once_between_two_steps(
    hook: str, number: int, options: dict[str, int], step: int, fast: bool, fit: Callable[..., Any], tmp_path: Path
):
    """An epoch has four steps of two micro-batches."""
    asks, last = AsksToStop(hook, number), LastCheckpoint(tmp_path / "last.ckpt")
    config = make_settings(epochs=2, batch_size=8, accumulate=2, fast_loop=fast)
    assert fit(config, 32, asks, last, enable_checkpointing=True, **options).trainer.global_step == step
    assert asks.saved == [*range(4, step, 4), step]
    progress = read(tmp_path / "last.ckpt")["loops"]["fit_loop"]
    assert progress["epoch_progress"]["current"]["processed"] == step // 4
    assert progress["epoch_loop.batch_progress"]["current"]["ready"] == 2 * (step % 4)


def test_a_later_checkpoint_does_not_hide_that_the_last_state_was_not_saved(fit: Callable[..., Any], tmp_path: Path):
    folder = tmp_path / "kept"
    (folder / "last.ckpt.tmp").mkdir(parents=True)  # in the way of the file
    last, best = LastCheckpoint(folder / "last.ckpt"), ModelCheckpoint(folder, "best", save_on_train_epoch_end=True)
    config = make_settings(epochs=1, batch_size=8)
    trainer = fit(config, 16, Interrupt(), last, best, enable_checkpointing=True).trainer
    assert (folder / "best.ckpt").exists()
    with pytest.raises(RunError, match=r"last\.ckpt could not be written"):
        check_saved(trainer)


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


@pytest.mark.usefixtures("signal_handlers")
def test_a_stop_by_slurm_without_scontrol_says_how_to_resume(
    fit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A container in the job may lack scontrol. A run without a checkpoint of its own resumes from the one before."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    sender = SendsSignal("on_train_batch_start", signal.SIGUSR1, "self")
    trainer = fit(make_settings(epochs=3, batch_size=8), 16, sender, Interrupt()).trainer
    run = resolve(command_line.parse(["--data.source", "digits", "--accelerator", "cpu"])).changed(resume="before.ckpt")
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(Stopped, match=r"step 1, saved; resume with: .* --resume before\.ckpt"),
        reported(trainer, run, tmp_path),
    ):
        check_stopped(trainer, run, tmp_path)
    assert "scontrol requeue 7 failed, so SLURM does not restart the job: No such file" in capsys.readouterr().err


class Fails(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise RunError("the loss is NaN")


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.parametrize("fails", [True, False])
def test_the_end_of_a_training_restores_signals_threads_and_kernels(fails: bool, fit: Callable[..., Any]):
    """The process may train another run, as docs/sweep.py does."""

    def state() -> tuple[Any, ...]:
        return signal.getsignal(signal.SIGTERM), torch.get_num_threads(), torch.backends.mkldnn.enabled

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before, callbacks = state(), [Interrupt(), CPUKernels(1, "32-true"), *([Fails()] if fails else [])]
        with pytest.raises(RunError) if fails else nullcontext():
            fit(make_settings(epochs=1, batch_size=8), 16, *callbacks, limit_val_batches=0)
        assert state() == before
    finally:
        torch.set_num_threads(threads)


STUCK = make_settings(optimizer=Choice("sgd", {"lr": 0.0}), batch_size=8, epochs=9)


def test_a_resumed_run_continues_counting_with_its_own_patience(fit: Callable[..., Any]):
    stopped = fit(STUCK, 16, EarlyStop("val/acc", 2, "max", "cross_entropy"))
    assert stopped.trainer.current_epoch == 3  # the first validation is the best, and two more follow
    before = stopped.observer(EarlyStop).state_dict()
    for patience, epochs in ((1, 0), (2, 0), (4, 2)):
        again = EarlyStop("val/acc", patience, "max", "cross_entropy")
        again.load_state_dict(before)
        assert fit(STUCK, 16, again).trainer.current_epoch == epochs
