"""Ends a training early, on all ranks after the same step, and shuts the ranks down."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer

from cifar_zero.checkpoints import resume
from cifar_zero.config.run import Run
from cifar_zero.core import exits
from cifar_zero.core.atomic import failure_of
from cifar_zero.core.console import RESUME_WITH, say
from cifar_zero.core.errors import RunError, Stopped, UsageError
from cifar_zero.launch.collectives import gather
from cifar_zero.training.callbacks.checkpoint import LastCheckpoint

EXCHANGE_SECONDS = 1.0
"""Approximate time between two exchanges, in which each rank learns which signal any rank has received. An exchange
all-reduces two numbers, which takes less than a thousandth of this time."""


class Interrupt(Callback):
    """Stops the training after a signal, without a validation in mid-epoch, so that a checkpoint can be written. The
    ranks exchange the signals they received about once a second, and stop after the same optimizer step.

    A second Ctrl-C ends the process at once, unless the checkpoint has already been written. A second signal from the
    cluster has no effect, because one signal of the cluster reaches a rank twice, directly and through the launcher.
    Before the training, and after one that no signal has stopped, `exits.interrupt` handles the signals. After a
    training that a signal has stopped, further signals have no effect.
    """

    def __init__(self) -> None:
        self.signal: int | None = None  # the signal that ended the training, or None
        self.has_started = self.has_ended = False
        self._requested: int | None = None
        self._previous: dict[int, Any] = {}
        self._exchange_step = self._next_exchange_step = 0
        self._exchanged = 0.0  # when the last exchange was, in seconds of the monotonic clock

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._exchange_step, self._exchanged = trainer.global_step, time.monotonic()
        for number in exits.requests():
            self._previous[number] = signal.signal(number, self._request)
        self.has_started = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if number := self._agreed_signal(trainer):
            self.signal = number
            trainer.should_stop = True
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = 0, None
            if not trainer.is_last_batch:
                # Otherwise Lightning validates, and a run resumed from a best checkpoint would skip the rest of the
                # epoch.
                trainer.limit_val_batches = 0

    def _agreed_signal(self, trainer: Trainer) -> int:
        """Returns the signal by which any rank has requested a stop, or 0. With several ranks, the result is always 0
        between two exchanges. It is the same on all ranks, because rank 0 requeues a SLURM job, and another rank may
        get the signal first. Every rank must call it after each optimizer step."""
        step, own = trainer.global_step, self._requested or 0
        if trainer.world_size == 1:
            return own
        if step < self._next_exchange_step:
            return 0
        now = time.monotonic()
        answers = torch.tensor([float(own), now - self._exchanged], device=trainer.strategy.root_device)
        torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MAX)
        number, seconds = answers.tolist()
        pace = (step - self._exchange_step) / max(seconds, 1e-6)
        self._exchange_step, self._exchanged = step, now
        self._next_exchange_step = step + max(1, int(pace * EXCHANGE_SECONDS))
        return int(number)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If no signal has stopped the training, restores the signal handlers, then asks all ranks whether a signal has
        come since the last exchange. If there is a signal, earlier or now, ignores all further ones."""
        self.has_ended = True
        if self.signal is None:
            self._restore_handlers()
            self.signal = next(filter(None, gather(self._requested)), None)
        if self.signal is not None:
            exits.ignore()

    def on_exception(self, *_: Any) -> None:
        """Restores the signal handlers, because this process may train another run."""
        if not self.has_ended:
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: Any) -> None:
        self._requested = self._requested or number
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])


def keep_handlers(trainer: Trainer) -> None:
    """Keeps Lightning (2.6.6), which has no option for this, from replacing the signal handlers.

    Lightning's handler of SIGTERM makes the exit code 0 (Lightning's issue 19916), and broadcasts to ranks that may be
    in another collective. After `fit`, Lightning would restore the earlier handlers, and a second signal could
    interrupt a run that is already ending, where `Interrupt.on_train_end` ignores signals.
    """
    connector: Any = trainer._signal_connector
    connector.register_signal_handlers = lambda: None


@contextmanager
def reported(trainer: Trainer, run: Run, run_dir: Path | None) -> Iterator[None]:
    """Context manager for `fit` and everything that follows it in a run. To the message of Stopped, it adds whether the
    run was saved and how to resume it, or raises RunError instead if the checkpoint could not be written. To exceptions
    of libraries and of the user's code, it adds a note on how to resume. Nothing is added where `run_dir` is None,
    which it is on all ranks but rank 0."""
    try:
        yield
    except Stopped as stop:
        raise Stopped(stop.number, _outcome(trainer, run, run_dir)) from stop
    except (UsageError, RunError):
        raise
    except Exception as error:  # another rank has ended, the memory is full, or the user's code failed
        if run_dir is not None and (resuming := resume.command_to_resume_newest(run, run_dir)):
            error.add_note(f"{RESUME_WITH} {resuming}")
        raise


def check_stopped(trainer: Trainer, run: Run, run_dir: Path | None) -> None:
    """If a signal has stopped the training, checks that the checkpoint was written (see `check_saved`), shuts the ranks
    down and raises Stopped. Rank 0 also requeues a SLURM job that was stopped by SLURM_REQUEUE."""
    interrupt = _interrupt(trainer)
    if interrupt.signal is None:
        return
    check_saved(trainer)
    if run_dir is not None and not run.recipe.only_measures and interrupt.signal == exits.SLURM_REQUEUE:
        # Requeued while the other ranks wait, because srun --kill-on-bad-exit ends the step when the first rank ends.
        requeue = ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]]
        if failure := failure_of(lambda: subprocess.run(requeue, check=True)):  # a container may lack scontrol
            say(f"{' '.join(requeue)} failed, so SLURM does not restart the job: {failure}")
    shutdown(trainer)
    raise Stopped(interrupt.signal)


def _outcome(trainer: Trainer, run: Run, run_dir: Path | None) -> str:
    """Returns a message on whether a run that a signal ended was saved and how to resume it. The message is empty if
    the run had not finished a step, and on all ranks but rank 0."""
    interrupt = _interrupt(trainer)
    if run_dir is None or not interrupt.has_started or not trainer.global_step:
        return ""
    step = f"stopped at step {trainer.global_step}"
    if run.recipe.only_measures:
        return step
    resuming = resume.command_to_resume_newest(run, run_dir)
    if interrupt.has_ended:
        check_saved(trainer)
        return f"{step}, saved; resume with: {resuming}"
    step += ", NOT saved, because Ctrl-C came twice"
    if resuming:
        step += f"; resume an earlier step with: {resuming}"
    return step


def _interrupt(trainer: Trainer) -> Interrupt:
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return next(callback for callback in callbacks if isinstance(callback, Interrupt))


def check_saved(trainer: Trainer) -> None:
    """Raises RunError if the last state could not be written to last.ckpt. Only rank 0 knows, so other ranks raise
    nothing."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, LastCheckpoint) and callback.failure:
            raise RunError(callback.failure)


def shutdown(trainer: Trainer) -> None:
    """Waits for the other ranks, and then destroys the process group, as torch requires at the end of a process."""
    trainer.strategy.barrier()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
