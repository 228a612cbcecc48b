"""When the next point of a curve is due, and where it is written."""

import math
from collections.abc import Mapping

from lightning.pytorch import Trainer


class Interval:
    """A point is due every so many optimizer steps, and at the last step of the run; asked after each micro-batch.

    Args:
        every: optimizer steps between two points.
    """

    def __init__(self, every: int):
        self.every = every
        self.next_step = every
        self._last_step = math.inf

    def start(self, trainer: Trainer) -> None:
        """Starts at the trainer's step: 0, or that of a resumed run."""
        total = trainer.estimated_stepping_batches
        self._last_step = total if total > 0 else math.inf  # Lightning returns -1 for an unknown length
        self._advance(trainer.global_step)

    def due(self, step: int) -> bool:
        """Returns whether a point is due after `step` optimizer steps; true once for each point."""
        if step < self.next_step:
            return False
        self._advance(step)
        return True

    def _advance(self, step: int) -> None:
        self.next_step = (step // self.every + 1) * self.every
        if step < self._last_step < self.next_step:
            self.next_step = int(self._last_step)


def log_scalars(trainer: Trainer, scalars: Mapping[str, float]) -> None:
    """Writes one point of each curve, at the number of optimizer steps done; only rank 0 has loggers."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), trainer.global_step)
