"""Ctrl-C and a cluster's request to end stop a training on all ranks after the same step."""

import os
import signal
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cifar_zero.training.callbacks.agreement import Agreement

SLURM_REQUEUE = signal.SIGUSR1
"""Sent by `sbatch --signal=USR1@90` before the time limit."""


class Interrupt(Callback):
    """Stops the training after such a signal, without a validation in mid-epoch, so that a checkpoint can be written.

    A second Ctrl-C ends the process at once. A second request of the cluster changes nothing, since it arrives both
    directly and through the launcher.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """What ended the training; None if nothing did."""
        self._agreement = Agreement()
        self._requested: int | None = None
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs the signal handlers."""
        wanted = [signal.SIGINT, signal.SIGTERM, *([SLURM_REQUEUE] if "SLURM_JOB_ID" in os.environ else [])]
        self._previous = {number: signal.signal(number, self._request) for number in wanted}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops after a step, as soon as any rank has got a signal."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if self._agreement.reached(trainer, self._requested is not None):
            self.signal = self._requested or signal.SIGTERM
            trainer.should_stop = True
            if not trainer.is_last_batch:
                # Else Lightning validates, and a best checkpoint from mid-epoch counts the epoch as done: a run that
                # resumes from it would skip the rest.
                trainer.limit_val_batches = 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: Any) -> None:
        self._requested = number
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])
