"""Ctrl-C and the requests to end of a cluster stop a training between two steps, on all ranks at the same one."""

import os
import signal
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cifar_zero.training.callbacks.agreement import Agreement

SLURM_REQUEUE = signal.SIGUSR1
"""What `sbatch --signal=USR1@90` sends before the time is over; elsewhere nobody sends it."""


class Interrupt(Callback):
    """Stops the training after such a signal, so that a whole checkpoint can be written; in mid-epoch it does not
    validate any more.

    A second Ctrl-C ends the process at once. A second request of the cluster changes nothing: it sends its requests to
    the launcher, which hands them on, and to the ranks too.
    """

    signal: int | None = None
    """What ended the training; None where nothing did."""

    def __init__(self) -> None:
        self._agreement = Agreement()
        self._requested: int | None = None
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the signals over."""
        wanted = [signal.SIGINT, signal.SIGTERM, *([SLURM_REQUEUE] if "SLURM_JOB_ID" in os.environ else [])]
        self._previous = {number: signal.signal(number, self._request) for number in wanted}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops, where it has been asked for, all ranks agree and no micro-batch is waiting for its step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if self._agreement.reached(trainer, self._requested is not None):
            self.signal = self._requested or signal.SIGTERM
            trainer.should_stop = True
            if not trainer.is_last_batch:
                # Lightning would validate now, and a best checkpoint of that says that its epoch is over: a run that
                # went on from it would leave the rest of the epoch out.
                trainer.limit_val_batches = 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: Any) -> None:
        self._requested = number
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])
