"""`--reduce_on_plateau`."""

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cifar_zero.core.console import say

FACTOR = 0.1  # torch's default, of ReduceLROnPlateau


class ReduceOnPlateau(Callback):
    """Multiplies the learning rate by FACTOR after `patience` validations in a row without a lower val/loss. torch's
    ReduceLROnPlateau takes none of DeepSpeed's optimizers, and Lightning (2.6.6) steps it after the epoch's checkpoint
    is written: a resumed run would not know that validation. The checkpoint's optimizer holds the rate."""

    def __init__(self, patience: int):
        self._patience, self._best, self._waited = patience, math.inf, 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts a validation, the same on every rank."""
        loss = trainer.callback_metrics["val/loss"].item()
        self._waited += 1
        if loss < self._best:
            self._best, self._waited = loss, 0
        if self._waited < self._patience:
            return
        self._waited = 0
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= FACTOR
        if trainer.is_global_zero:
            say(f"val/loss has not fallen below {self._best:.4f}: learning rate {group['lr']:.2g} from here on")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best, self._waited = state_dict["best"], state_dict["waited"]
