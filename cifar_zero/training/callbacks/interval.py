"""When the next point of a curve is due, and where it is written."""

from collections.abc import Mapping

from lightning.pytorch import Trainer


class Interval:
    """A point is due every so many optimizer steps, and at the last step of the run.

    Args:
        every: optimizer steps between two points.
    """

    def __init__(self, every: int):
        self._every = every
        self._newest = self._last_step = 0

    def start(self, trainer: Trainer) -> None:
        """Starts at the trainer's step: 0, or that of a resumed run."""
        self._newest = trainer.global_step
        self._last_step = trainer.estimated_stepping_batches  # -1 or infinite if Lightning does not know it

    def is_point(self, step: int) -> bool:
        """Returns whether a point belongs to `step` optimizer steps."""
        return step % self._every == 0 or step == self._last_step

    def due(self, step: int) -> bool:
        """Returns whether a point is due after a micro-batch; true once for each point, though the steps stand still
        while micro-batches are accumulated."""
        if step == self._newest or not self.is_point(step):
            return False
        self._newest = step
        return True


def log_scalars(trainer: Trainer, scalars: Mapping[str, float]) -> None:
    """Writes one point of each curve, at the number of optimizer steps done; only rank 0 has loggers."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), trainer.global_step)
