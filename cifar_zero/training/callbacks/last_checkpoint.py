"""checkpoints/last.ckpt: the newest state of a run."""

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from cifar_zero.training.callbacks.stop import Agreement


class LastCheckpoint(Checkpoint):
    """Saves at the end of each epoch, and after the last step if --max_steps or Ctrl-C ends the training in mid-epoch.

    ModelCheckpoint(save_last=True) does not (Lightning 2.6.6): it saves the last state only together with a best one.

    Args:
        path: of the checkpoint, on rank 0, which broadcasts it.
        minutes: of training between two saves in mid-epoch; 0: none.
    """

    def __init__(self, path: Path | None, minutes: float = 0.0):
        self._path = path
        self._seconds = 60 * minutes
        self._saved_at = 0.0
        self._agreement = Agreement()
        self._saved_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Broadcasts the path; the resumed checkpoint is not saved again."""
        self._path = trainer.strategy.broadcast(self._path)
        self._saved_step = trainer.global_step
        self._saved_at = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves."""
        self._save(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves after the last step or when it is time; at the end of the training the epoch would count as done."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches or trainer.is_last_batch:
            return
        is_late = time.monotonic() - self._saved_at >= self._seconds
        is_time = self._seconds and self._agreement.reached(trainer, is_late)
        if is_time or trainer.should_stop or trainer.global_step == trainer.max_steps:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self._path is not None and trainer.global_step > self._saved_step:
            self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
            trainer.save_checkpoint(self._path, weights_only=False)
