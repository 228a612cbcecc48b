"""The training curves: loss, epoch, learning rate and gradient norm against optimizer steps."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from cifar_zero.checkpoints import run_folder
from cifar_zero.training.callbacks.gradient_norm import norm_after_step, norm_before_step
from cifar_zero.training.callbacks.interval import Interval, log_scalars


class TrainingCurves(Callback):
    """Writes the train/* curves, and the loss of each optimizer step into `losses.csv`.

    Between two points it only keeps the losses, on the device, so that no step waits for a value to reach the host.

    Args:
        log_interval: optimizer steps between two points.
        run_dir: the run folder, on rank 0 of a run that is to leave its losses there.
    """

    last_loss: float | None = None
    """train/loss of the newest point: mean over the micro-batches of its interval and over all ranks."""

    losses: list[Tensor]
    """Loss of each micro-batch since the newest point, on the device."""

    logged_losses: Tensor | None = None
    """Those of the newest point, of this rank."""

    last_gradient_norm: float | None = None
    """train/grad_norm of the newest point."""

    last_epoch: float = 0.0
    """train/epoch of the newest point: passes over the training images."""

    def __init__(self, log_interval: int, run_dir: Path | None = None):
        self._interval = Interval(log_interval)
        self._file = None if run_dir is None else run_dir / run_folder.LOSSES
        self.losses = []
        self._step_ends: list[int] = []
        self._logged_step = 0
        self._learning_rate: float | None = None
        self._gradient_norm: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins the first interval."""
        self._interval.start(trainer)
        self._logged_step = trainer.global_step
        self.losses, self._step_ends = [], []
        if self._file is not None:
            self._file.write_text("step,loss\n")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Before a step that is to be logged: its learning rate and gradient norm, which the step itself will change.

        DeepSpeed calls it for every micro-batch; the last before the step, with all gradients added up, counts.
        """
        if trainer.global_step + 1 < self._interval.next_step:
            return
        self._learning_rate = optimizer.param_groups[0]["lr"]
        self._gradient_norm = norm_before_step(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps a micro-batch's loss, and writes the point that is due."""
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
        # It reduces in place, and this rank's own are wanted too.
        losses = trainer.strategy.reduce(self.logged_losses.clone(), reduce_op="mean").tolist()
        self.last_loss = sum(losses) / len(losses)
        self._write(losses)
        self.last_epoch = (trainer.fit_loop.total_batch_idx + 1) / trainer.num_training_batches
        self._logged_step = trainer.global_step
        scalars = {
            "train/loss": self.last_loss,
            "train/epoch": self.last_epoch,
            "train/global_step": self._logged_step,
        }
        if self._learning_rate is not None:  # unknown where nobody could tell that this step would be the last
            norm = norm_after_step(trainer) if self._gradient_norm is None else self._gradient_norm.item()
            scalars["train/learning_rate"] = self._learning_rate
            self.last_gradient_norm = norm
            if norm is not None:
                scalars["train/grad_norm"] = norm
        log_scalars(trainer, scalars)
        self.losses, self._step_ends = [], []
        self._learning_rate = self._gradient_norm = None

    def _write(self, losses: list[float]) -> None:
        """Appends the steps since the newest point; `losses` are of their micro-batches, means over all ranks.

        A float is written as Python does, so that reading it gives the same bits.
        """
        if self._file is None:
            return
        starts = [0, *self._step_ends]
        steps = [losses[start:end] for start, end in zip(starts, self._step_ends, strict=False)]
        with self._file.open("a") as file:
            for step, own in enumerate(steps, start=self._logged_step + 1):
                file.write(f"{step},{sum(own) / len(own)!r}\n")
