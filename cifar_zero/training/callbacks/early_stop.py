"""Ends a training that no longer improves."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from cifar_zero.core.console import say


class EarlyStop(EarlyStopping):
    """Lightning's EarlyStopping on val/acc, which also chooses the best checkpoint; reports in one line when it stops.

    A resumed run continues the count with its own patience, and ends at once if that is already exhausted. An epoch
    that --max_steps cuts short has no validation and does not count.

    Args:
        patience: validations in a row without a better val/acc.
    """

    def __init__(self, patience: int):
        super().__init__("val/acc", mode="max", patience=patience, strict=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the count, but not the patience of the old run, as Lightning (2.6.6) would."""
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends a resumed training whose patience is already exhausted."""
        trainer.should_stop = trainer.should_stop or self._over

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints why the training has ended."""
        if self._over and trainer.is_global_zero:
            since = f"{self.wait_count} validation{'s'[: self.wait_count > 1]}"
            best = f"val/acc has not exceeded {self.best_score.item():.2%} in {since}"
            say(f"early stopping after epoch {self.stopped_epoch + 1}: {best}")

    @property
    def _over(self) -> bool:
        return self.wait_count >= self.patience
