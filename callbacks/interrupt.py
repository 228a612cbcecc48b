"""Ctrl-C ends a training between two steps, on all ranks at the same one, so that a whole checkpoint can be written."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from callbacks.interval import Interval

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Interrupt(Callback):
    """Stops the training after Ctrl-C; a second Ctrl-C ends the process at once.

    A rank on its own stops after its step. Several agree at each logging interval, which costs one small reduction:
    each may have been told at another step.

    Args:
        log_interval: optimizer steps between two agreements.
    """

    stopped = False
    """Whether the training was ended by Ctrl-C."""

    def __init__(self, log_interval: int):
        self._interval = Interval(log_interval)
        self._requested = False
        self._previous: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes Ctrl-C over."""
        self._interval.start(trainer)
        self._previous = signal.signal(signal.SIGINT, self._request)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops, where it has been asked for and all ranks agree."""
        if trainer.world_size == 1:
            self.stopped = self._requested and (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        elif self._interval.due(trainer.global_step):
            self.stopped = trainer.strategy.reduce_boolean_decision(self._requested, all=False)
        if self.stopped:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives Ctrl-C back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _request(self, *_: Any) -> None:
        self._requested = True
        signal.signal(signal.SIGINT, self._previous)
