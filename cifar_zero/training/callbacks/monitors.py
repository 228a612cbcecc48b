"""Defines the callbacks that react to losses and metrics. They end a diverged run, or stop early."""

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from cifar_zero.core.console import say
from cifar_zero.core.errors import RunError
from cifar_zero.strategies import hooks_of
from cifar_zero.training.callbacks.curves import TrainingCurves

LEAST_SCALE = 1.0  # DeepSpeed's lowest loss scale; if all steps overflow, torch's scaler halves its scale without end

FIX = "lower --optimizer.lr or set --gradient_clip_val 1"


class Divergence(Callback):
    """Ends a run with RunError if losses or weights are NaN or infinite, or if the float16 loss scale has reached its
    minimum. Every rank reaches the same decision.

    Training losses are checked before each checkpoint and at each point of the training curves, where they are on the
    host already. No training loss shows the effect of the last update, so the losses of validation and test are checked
    too, and the weights before each checkpoint.

    Args:
        curves: The callback from which the losses are read. It must come before this callback in the Trainer's list.
    """

    def __init__(self, curves: TrainingCurves):
        self._curves = curves

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if self._curves.losses:  # this step is not a point
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
        for split, name in (("val", "validation"), ("test", "test")):
            if not math.isfinite(trainer.callback_metrics.get(f"{split}/loss", 0.0)):
                raise RunError(f"the loss of the {name} after step {trainer.global_step} is NaN or infinite: {FIX}")

    on_test_end = on_validation_end

    def _check(self, trainer: Trainer, losses: list[float]) -> None:
        """Raises RunError unless all losses are finite. `losses` has the losses of the last micro-batches. The last one
        belongs to the current step."""
        for number, loss in enumerate(losses):
            if not math.isfinite(loss):
                step = trainer.global_step - (len(losses) - 1 - number) // trainer.accumulate_grad_batches
                raise RunError(f"the loss is NaN or infinite from step {step} on: {FIX}")


class EarlyStop(EarlyStopping):
    """Stops the training as Lightning's EarlyStopping does, and prints one line when it stops.

    The metric is read after each validation, because at the end of an epoch that --max_steps or a signal cuts short,
    Lightning would read the metric of an earlier epoch. A resumed run continues the count of validations without an
    improvement with its own patience, and ends at once if the patience is already exhausted. If the run monitors
    val/loss and has another loss now, the count begins again.
    """

    def __init__(self, monitor: str, patience: int, mode: str, loss: str):
        super().__init__(monitor, patience=patience, mode=mode, check_on_train_epoch_end=False)
        self._loss = loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "loss": self._loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the count of validations without an improvement. Lightning (2.6.6) would also restore the patience
        of the run that saved the checkpoint."""
        if self.monitor != "val/loss" or state_dict.get("loss", self._loss) == self._loss:
            super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.wait_count >= self.patience and trainer.is_global_zero:
            waited = "1 validation" if self.wait_count == 1 else f"{self.wait_count} validations"
            best = f"{self.monitor} has not improved on {self.best_score.item():.4g} in {waited}"
            say(f"early stopping after epoch {self.stopped_epoch + 1}: {best}")
