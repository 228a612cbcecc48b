"""Ends a training that no longer gets better."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from cifar_zero.core.console import say


class EarlyStop(EarlyStopping):
    """Lightning's, on val/acc, by which the best checkpoint is chosen too; says in one line that it has ended the run.

    A resumed run goes on counting, with its own patience, and ends at once where that is over already. An epoch that
    --max_steps cuts short has no validation and does not count.

    Args:
        patience: validations in a row without a better val/acc.
    """

    def __init__(self, patience: int):
        super().__init__("val/acc", mode="max", patience=patience, strict=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the count; Lightning's (2.6.6) would take the old run's patience too."""
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends a training that goes on from where its patience was over."""
        trainer.should_stop = trainer.should_stop or self._over

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says why."""
        if self._over and trainer.is_global_zero:
            say(
                f"the training has ended early, after epoch {self.stopped_epoch + 1}: val/acc has not been above "
                f"{self.best_score.item():.2%} in {self.wait_count} validation{'s'[: self.wait_count > 1]}"
            )

    @property
    def _over(self) -> bool:
        return self.wait_count >= self.patience
