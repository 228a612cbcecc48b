"""Ends a run whose loss or weights are NaN or infinite, before they reach a checkpoint, and names the step."""

import math
from typing import Any

from lightning.pytorch import Callback, Trainer

from cifar_zero.core.errors import RunError
from cifar_zero.strategies import hooks_of
from cifar_zero.training.callbacks.curves import TrainingCurves

LEAST_SCALE = 1.0  # of the loss, DeepSpeed's lowest; torch's scaler would halve it without end if all steps overflow

FIX = "lower --optimizer.lr or set --gradient_clip_val 1"


class Divergence(Callback):
    """Checks the losses at each point of the curves, where they are on the host already, and before each checkpoint.
    No training loss shows what the last update did: the losses of the validation and the test are checked too, and the
    weights before each checkpoint. The callback of the curves must come before it. All values are the same on every
    rank."""

    def __init__(self, curves: TrainingCurves):
        self._curves = curves

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if self._curves.losses:  # no point
            return
        scale = hooks_of(trainer.strategy).loss_scale()
        if scale is not None and scale <= LEAST_SCALE:
            raise RunError(
                f"float16 overflowed until the loss scale was {scale:g}, at step {trainer.global_step}: "
                "use --precision bf16-mixed, or lower --optimizer.lr"
            )
        self._check(trainer, self._curves.point_losses)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._curves.losses:
            self._check(trainer, self._curves.reduced_losses(trainer))
        hooks = hooks_of(trainer.strategy)
        trained = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        finite = all(bool(hooks.local(parameter).isfinite().all()) for parameter in trained)
        if not trainer.strategy.reduce_boolean_decision(finite):  # each rank has checked its own shards
            raise RunError(f"weights are NaN or infinite after step {trainer.global_step}: {FIX}")

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._check_split(trainer, "val", "validation")

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._check_split(trainer, "test", "test")

    def _check_split(self, trainer: Trainer, split: str, name: str) -> None:
        if not math.isfinite(trainer.callback_metrics.get(f"{split}/loss", 0.0)):
            raise RunError(f"the loss of the {name} after step {trainer.global_step} is NaN or infinite: {FIX}")

    def _check(self, trainer: Trainer, losses: list[float]) -> None:
        """Checks the losses of the newest micro-batches, the last of which belongs to the newest step."""
        for ago, loss in zip(range(len(losses) - 1, -1, -1), losses, strict=True):
            if not math.isfinite(loss):
                step = trainer.global_step - ago // trainer.accumulate_grad_batches
                raise RunError(f"the loss is NaN or infinite from step {step} on: {FIX}")
