"""Lightning's loop over epochs, with two faults of its resume corrected, and epochs that end within a step refused."""

import math
from typing import Any

from lightning.pytorch.loops.fit_loop import _FitLoop

from cifar_zero.core.errors import UsageError


class FitLoop(_FitLoop):
    """Trains epoch after epoch.

    If `max_steps` is set, Lightning 2.6.6 takes a checkpoint of an epoch's end for one of its middle: the resumed run
    counts that epoch twice, and skips the images of the next one or ends at once. Here the run resumes as if max_steps
    were not set. It can be removed when Lightning's issue 19617 is fixed.

    From a checkpoint of an epoch's last batch, as a user's own ModelCheckpoint may write, Lightning continues with the
    next epoch, but as if it were in its middle: its start is not counted, and a later checkpoint of that epoch resumes
    at its first image. No upstream issue is known; tests/distributed/test_resume.py shows it.
    """

    def setup_data(self) -> None:
        """Makes the loader. Raises UsageError: an epoch ends within a step, as its batches are limited or a user's."""
        super().setup_data()
        parts, batches = self.trainer.accumulate_grad_batches, self.max_batches
        if batches != math.inf and batches % parts:  # infinite: an IterableDataset
            raise UsageError(
                f"--accumulate {parts} does not divide the {batches} batches of an epoch, and DeepSpeed would add the "
                f"rest to the next epoch's: add --trainer.limit_train_batches {max(parts, batches // parts * parts)}"
            )

    def reset(self) -> None:
        """Restores the counters; the epoch after a checkpoint of a last batch begins as any other."""
        super().reset()
        epoch: Any = self.epoch_progress.current
        if self.restarted_mid_epoch and epoch.processed == epoch.ready:
            self.reset_restart_stage()

    def _iteration_based_training(self) -> bool:
        return False
