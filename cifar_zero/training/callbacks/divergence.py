"""A loss that is no number or infinite ends the run before a checkpoint is spoilt, and says where it came from."""

import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from cifar_zero.checkpoints import run_folder
from cifar_zero.core.console import say
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.training.callbacks.curves import TrainingCurves

LEAST_SCALE = 1.0
"""Of float16 losses: torch's scaler halves it without end where every step overflows; DeepSpeed stops here itself."""


class Divergence(Callback):
    """Looks at the losses where they are on the host anyhow, at each point of the curves, and before each checkpoint.

    Args:
        curves: of the run; they come before this.
        run_dir: the run folder, on rank 0.
    """

    def __init__(self, curves: TrainingCurves, run_dir: Path | None):
        self._curves = curves
        self._run_dir = run_dir
        self._norm: float | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Looks at the newest point of the curves."""
        if not self._curves.losses:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            if scaler is not None and (scale := scaler.get_scale()) < LEAST_SCALE:
                raise RunError(
                    f"float16 overflowed down to a loss scale of {scale:g}, at step {trainer.global_step}: "
                    "use --precision bf16-mixed, or lower --optimizer.lr"
                )
            self._look(trainer, pl_module, self._curves.logged_losses, self._curves.last_loss)
            self._norm = self._curves.last_gradient_norm

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Looks at the last point; says what --on_nan skip has left out."""
        self._look(trainer, pl_module, self._curves.logged_losses, self._curves.last_loss)
        if pl_module.skipped and trainer.is_global_zero:
            say(f"{pl_module.skipped} micro-batches, whose loss was no number or infinite, were left out")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Looks at what came since the newest point."""
        if self._curves.losses:
            losses = torch.stack(self._curves.losses)
            self._look(trainer, pl_module, losses, trainer.strategy.reduce(losses.sum(), reduce_op="sum").item())

    def _look(self, trainer: Trainer, module: Any, losses: Tensor | None, total: float | None) -> None:
        """Raises RunError where `total`, which is the same on every rank, is not finite; `losses` are this rank's."""
        if total is None or math.isfinite(total):
            return
        assert losses is not None
        first = torch.where(losses.isfinite(), len(losses), torch.arange(len(losses), device=losses.device)).min()
        if trainer.world_size > 1:
            torch.distributed.all_reduce(first, torch.distributed.ReduceOp.MIN)
        accumulate = trainer.accumulate_grad_batches
        step = trainer.global_step - (len(losses) - 1 - int(first.item())) // accumulate
        raise RunError(self._message(trainer, module, step))

    def _message(self, trainer: Trainer, module: Any, step: int) -> str:
        rate = module.schedule.rate(step - 1, module.optimizer.lr)
        known = [f"epoch {trainer.current_epoch + 1}", f"learning rate {rate:g}"]
        if self._norm is not None:
            known.append(f"gradient norm {self._norm:.3g} at the last point of the curves")
        if (scale := loss_scale(trainer)) is not None:
            known.append(f"loss scale {scale:g}")
        mends = "lower --optimizer.lr or set --gradient_clip_val 1; --on_nan skip leaves such batches out"
        return (
            f"the loss is no number or infinite from step {step} on ({', '.join(known)}): {mends}; {self._again(step)}"
        )

    def _again(self, step: int) -> str:
        """The command that comes to the same batch."""
        if self._run_dir is None:
            return ""
        command = f"--config {self._run_dir / run_folder.CONFIG} --max_steps {step} --log_interval 1"
        try:
            before = f" --resume {run_folder.newest_checkpoint(self._run_dir)}"
        except UsageError:
            before = ""
        return f"that batch again: train.py {command}{before}"


def loss_scale(trainer: Trainer) -> float | None:
    """What float16 losses are multiplied by; None in the other number formats."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        return scaler.get_scale()
    if trainer.precision == "16-mixed":
        return getattr(trainer.optimizers[0], "cur_scale", None)
    return None
