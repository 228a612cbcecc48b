"""The training curves: loss, epoch, learning rate and gradient norm over the optimizer steps."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from cifar_zero.checkpoints import run_folder
from cifar_zero.strategies.norm import global_norm
from cifar_zero.training.callbacks.effective import deepspeed_engine
from cifar_zero.training.callbacks.interval import Interval, log_scalars


class TrainingCurves(Callback):
    """Writes the train/* curves, and the loss of each optimizer step into `losses.csv`.

    Between two points it only keeps the losses, on the device, so that no step waits for a value to reach the host.

    Args:
        log_interval: optimizer steps between two points.
        run_dir: the run folder, on rank 0 of a run that writes `losses.csv`.
    """

    def __init__(self, log_interval: int, run_dir: Path | None = None):
        self.last_loss: float | None = None
        """train/loss of the newest point: mean over the micro-batches of its interval and over all ranks."""
        self.last_gradient_norm: float | None = None
        """train/grad_norm of the newest point."""
        self.last_epoch = 0.0
        """train/epoch of the newest point: passes over the training images."""
        self.losses: list[Tensor] = []
        """Loss of each micro-batch since the newest point, on the device."""
        self.logged_losses: Tensor | None = None
        """This rank's losses of the newest point."""
        self._interval = Interval(log_interval)
        self._file = None if run_dir is None else run_dir / run_folder.LOSSES
        self._step_ends: list[int] = []
        self._logged_step = 0
        self._learning_rate: float | None = None
        self._gradient_norm: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the first interval."""
        self._interval.start(trainer)
        self._logged_step = trainer.global_step
        self.losses, self._step_ends = [], []
        if self._file is not None:
            self._file.write_text("step,loss\n")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Keeps the learning rate and the gradient norm of a step that will be logged, before the step changes them.

        DeepSpeed calls it for every micro-batch; the last call before the step, with all gradients added up, counts.
        """
        if not self._interval.is_point(trainer.global_step + 1):
            return
        self._learning_rate = optimizer.param_groups[0]["lr"]
        self._gradient_norm = norm_before_step(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps a micro-batch's loss, and writes a point if one is due."""
        self.losses.append(outputs["loss"])
        if trainer.global_step > self._logged_step + len(self._step_ends):
            self._step_ends.append(len(self.losses))
        if self._interval.due(trainer.global_step):
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the last point of a run that was stopped early."""
        if trainer.global_step > self._logged_step:
            self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        # Lightning (2.6.6) hands out the loss divided by accumulate_grad_batches, under DeepSpeed too.
        self.logged_losses = torch.stack(self.losses) * trainer.accumulate_grad_batches
        # It reduces in place, and this rank's own losses are needed too.
        losses = trainer.strategy.reduce(self.logged_losses.clone(), reduce_op="mean").tolist()
        self.last_loss = sum(losses) / len(losses)
        self._write(losses)
        self.last_epoch = (trainer.fit_loop.total_batch_idx + 1) / trainer.num_training_batches
        self._logged_step = step = trainer.global_step
        scalars = {"train/loss": self.last_loss, "train/epoch": self.last_epoch, "train/global_step": step}
        if self._learning_rate is not None:  # unknown if the run was stopped at a step that nobody could foresee
            norm = norm_after_step(trainer) if self._gradient_norm is None else self._gradient_norm.item()
            self.last_gradient_norm = norm
            scalars["train/learning_rate"] = self._learning_rate
            scalars |= {} if norm is None else {"train/grad_norm": norm}
        log_scalars(trainer, scalars)
        self.losses, self._step_ends = [], []
        self._learning_rate = self._gradient_norm = None

    def _write(self, losses: list[float]) -> None:
        """Appends the steps since the newest point; `losses`: of their micro-batches, means over all ranks.

        Floats are written with `repr`, so that reading them gives the same bits.
        """
        if self._file is None:
            return
        starts = [0, *self._step_ends]
        steps = [losses[start:end] for start, end in zip(starts, self._step_ends, strict=False)]
        with self._file.open("a") as file:
            for step, own in enumerate(steps, start=self._logged_step + 1):
                file.write(f"{step},{sum(own) / len(own)!r}\n")


def norm_before_step(trainer: Trainer, module: LightningModule) -> Tensor | None:
    """Returns the global L2 norm of the gradients of the coming step, over all parameters and before clipping.

    A float32 scalar on the rank's device, the same on every rank; None where DeepSpeed has taken the gradients over and
    computes the norm in its step.
    """
    engine = deepspeed_engine(trainer)
    if engine is not None and engine.zero_optimization():
        return None
    norm = global_norm(module.parameters())
    if norm is not None and engine is not None and engine.fp16_enabled():
        return norm / engine.optimizer.loss_scale
    return norm


def norm_after_step(trainer: Trainer) -> float | None:
    """Returns the norm that DeepSpeed's optimizer computed in the last step; None without DeepSpeed.

    At stage 0 DeepSpeed (0.19.8) has none in float32 (its issue 7255), and in float16 without its FusedAdam one that is
    not divided by the loss scale: there `norm_before_step` gives it.
    """
    engine = deepspeed_engine(trainer)
    norm = None if engine is None else engine.get_global_grad_norm()
    return None if norm is None else float(norm)
