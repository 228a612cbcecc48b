"""Ends a run whose loss or weights are NaN or infinite, before they reach a checkpoint, and names the step."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from cifar_zero.checkpoints import run_folder
from cifar_zero.core.console import command, say
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.schedules import Constant
from cifar_zero.strategies import hooks_of
from cifar_zero.training.callbacks.curves import TrainingCurves

LEAST_SCALE = 1.0  # of the loss, DeepSpeed's lowest; torch's scaler would halve it without end if all steps overflow


class Divergence(Callback):
    """Checks the losses at each point of the curves, where they are on the host already, and before each checkpoint.
    No training loss shows what the last update did: the losses of the validation and the test are checked too, and the
    weights before each checkpoint.
    The callback of the curves must come before it."""

    def __init__(self, curves: TrainingCurves):
        self._curves = curves
        self._norm: float | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if self._curves.losses:
            return
        scale = hooks_of(trainer.strategy).loss_scale()
        if scale is not None and scale <= LEAST_SCALE:
            raise RunError(
                f"float16 overflowed until the loss scale was {scale:g}, at step {trainer.global_step}: "
                "use --precision bf16-mixed, or lower --optimizer.lr"
            )
        self._check(trainer, pl_module, self._curves.logged_losses, self._curves.last_loss)
        self._norm = self._curves.last_gradient_norm

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.skipped and trainer.is_global_zero:
            say(f"--on_nan skip left out {pl_module.skipped} micro-batches with a NaN or infinite loss")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._curves.losses:
            losses = torch.stack(self._curves.losses)
            self._check(trainer, pl_module, losses, trainer.strategy.reduce(losses.sum(), reduce_op="sum").item())
        hooks = hooks_of(trainer.strategy)
        trained = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        finite = all(bool(hooks.local(parameter).isfinite().all()) for parameter in trained)
        if not trainer.strategy.reduce_boolean_decision(finite):  # each rank has checked its own shards
            what = f"weights are NaN or infinite after step {trainer.global_step}"
            raise RunError(self._message(trainer, pl_module, trainer.global_step, what))

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._check_split(trainer, pl_module, "val", "validation")

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._check_split(trainer, pl_module, "test", "test")

    def _check_split(self, trainer: Trainer, module: Any, split: str, name: str) -> None:
        """Raises RunError if the loss of a split is not finite; it is the same on every rank."""
        if not math.isfinite(trainer.callback_metrics.get(f"{split}/loss", 0.0)):
            what = f"the loss of the {name} after step {trainer.global_step} is NaN or infinite"
            raise RunError(self._message(trainer, module, trainer.global_step, what))

    def _check(self, trainer: Trainer, module: Any, losses: Tensor | None, total: float | None) -> None:
        """Raises RunError if `total`, the same on every rank, is not finite; `losses`: this rank's micro-batches'."""
        if total is None or losses is None or math.isfinite(total):
            return
        first = torch.where(losses.isfinite(), len(losses), torch.arange(len(losses), device=losses.device)).min()
        if trainer.world_size > 1:
            torch.distributed.all_reduce(first, torch.distributed.ReduceOp.MIN)
        behind = (len(losses) - 1 - int(first.item())) // trainer.accumulate_grad_batches
        step = trainer.global_step - behind
        raise RunError(self._message(trainer, module, step, f"the loss is NaN or infinite from step {step} on"))

    def _message(self, trainer: Trainer, module: Any, step: int, what: str) -> str:
        rate = module.schedule.rate(step - 1, module.optimizer.lr)
        if isinstance(module.schedule, Constant):  # unless --reduce_on_plateau has lowered it
            rate = float(trainer.optimizers[0].param_groups[0]["lr"])
        known = f"epoch {trainer.current_epoch + 1}, learning rate {rate:g}"
        if self._norm is not None:
            known += f", gradient norm {self._norm:.3g} at the last point of the curves"
        if (scale := hooks_of(trainer.strategy).loss_scale()) is not None:
            known += f", loss scale {scale:g}"
        fixes = "lower --optimizer.lr or set --gradient_clip_val 1; --on_nan skip leaves such batches out"
        message = f"{what} ({known}): {fixes}"
        if not trainer.is_global_zero:
            return message
        run_dir = Path(trainer.default_root_dir)
        flags = ["--config", run_dir / run_folder.CONFIG, "--max_steps", step, "--log_interval", 1]
        with suppress(UsageError):  # no checkpoint yet
            flags += ["--resume", run_folder.newest_checkpoint(run_dir)]
        return f"{message}; to repeat that batch: {command('train', *flags)}"
