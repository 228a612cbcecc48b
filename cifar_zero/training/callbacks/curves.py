"""Writes the training curves over the optimizer steps: loss, epoch, learning rate, gradients, and how mixtures of
experts distribute their tokens. Also defines the steps at which the curves have a point."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.optim import Optimizer

from cifar_zero.checkpoints import run_folder
from cifar_zero.core.atomic import attempt
from cifar_zero.strategies import hooks_of
from cifar_zero.training.loggers import write_to

REPORTED = "cifar_zero_reported"
"""Key under which `TrainingCurves` adds the training loss and the validation accuracy to each checkpoint."""


class IntervalCallback(Callback):
    """Base class of the callbacks that write a point of their curves (`_log`) every --log_interval optimizer steps, and
    after the last step, even if a signal ends the run there."""

    keeps_gradients = True  # for stepcheck, which notes callbacks that may change gradients
    _last_step: float = -1  # the step that is planned to be the last
    _logged_step = 0  # step of the newest point, or the step at which the training began

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged_step = trainer.global_step
        self._last_step = trainer.estimated_stepping_batches

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if self.is_point(trainer, trainer.global_step):
            self._log_once(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_once(trainer)

    def is_point(self, trainer: Trainer, step: int) -> bool:
        every = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        return step % every == 0 or step == self._last_step

    def _log_once(self, trainer: Trainer) -> None:
        if trainer.global_step > self._logged_step:  # several micro-batches may see the same step
            self._logged_step = trainer.global_step
            self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        """Writes a point of the curves. It is called on every rank, after the same steps."""


def log_scalars(trainer: Trainer, scalars: Mapping[str, float]) -> None:
    """Writes one point of each curve to all loggers, which only rank 0 has. `scalars` has the values, keyed by the tag
    of their curve. The x-coordinate is the number of optimizer steps done."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), trainer.global_step)


class TrainingCurves(IntervalCallback):
    """Writes the train/* curves. With `writes_losses`, also writes the loss of each optimizer step, averaged over its
    micro-batches and all ranks, into the file `losses.csv`. The losses stay on the device until the next point of the
    curves, so that no step waits for a value to reach the host."""

    def __init__(self, writes_losses: bool = True):
        # The newest point, by tag. train/loss is the mean over the micro-batches of the interval and over all ranks,
        # and train/epoch counts passes over the training images.
        self.newest: dict[str, float] = {}
        # Values for metrics.json: passes over the training images, mean loss of the last interval, and accuracy in the
        # last validation.
        self._epochs, self._loss, self._accuracy = 0.0, None, None
        self.point_losses: list[float] = []  # loss of each micro-batch of the newest point
        self.losses: list[Tensor] = []  # loss of each micro-batch since the newest point, on the device
        self._writes_losses = writes_losses
        self._learning_rate: float | None = None
        self._gradient_norm: Tensor | None = None

    @property
    def totals_of_run(self) -> dict[str, float | None]:
        """Values that the callback adds to metrics.json."""
        return {"epochs": self._epochs, "train/loss": self._loss, "val/acc": self._accuracy}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the values that a resumed run reports if it has no step or no validation of its own. Every rank must
        call it."""
        loss = _mean(self.reduced_losses(trainer)) if self.losses else self._loss
        checkpoint[REPORTED] = {"loss": loss, "accuracy": self._accuracy}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(REPORTED, {})
        self._loss, self._accuracy = saved.get("loss"), saved.get("accuracy")

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._accuracy = pl_module.val_metrics.overall()["acc"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.losses = []
        self._write(trainer, "step,loss\n", mode="w")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Keeps the learning rate and the gradient norm of a step at which the curves have a point. Under DeepSpeed
        this hook is called for every micro-batch. Only the values of the last call, which sees all summed gradients,
        remain."""
        if not self.is_point(trainer, trainer.global_step + 1):
            return
        self._learning_rate = float(optimizer.param_groups[0]["lr"])
        self._gradient_norm = hooks_of(trainer.strategy).gradient_norm(pl_module.parameters())

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"])
        super().on_train_batch_end(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epochs = _epochs_done(trainer)

    def _log(self, trainer: Trainer) -> None:
        losses = self.point_losses = self.reduced_losses(trainer)
        step, parts = trainer.global_step, trainer.accumulate_grad_batches
        steps = [sum(each) / parts for each in zip(*[iter(losses)] * parts, strict=False)]
        rows = enumerate(steps, start=step - len(steps) + 1)
        self._write(trainer, "".join(f"{number},{loss!r}\n" for number, loss in rows))  # repr keeps every bit of a loss
        self._loss = _mean(losses)
        scalars = {"train/loss": self._loss, "train/epoch": _epochs_done(trainer), "train/global_step": step}
        if self._learning_rate is not None:  # None if a signal stopped the run at an unforeseen step
            scalars["train/learning_rate"] = self._learning_rate
            norm = self._gradient_norm
            if norm is None:
                norm = hooks_of(trainer.strategy).step_gradient_norm()
            if norm is not None:
                scalars["train/grad_norm"] = float(norm)
        self.newest = scalars
        log_scalars(trainer, scalars)
        self.losses = []
        self._learning_rate = self._gradient_norm = None

    def reduced_losses(self, trainer: Trainer) -> list[float]:
        """Returns the loss of each micro-batch since the last point of the curves, averaged over all ranks. Every rank
        must call it."""
        # Lightning (2.6.6) passes on the loss divided by accumulate_grad_batches, under DeepSpeed too.
        own = torch.stack(self.losses) * trainer.accumulate_grad_batches
        return trainer.strategy.reduce(own, reduce_op="mean").tolist()

    def _write(self, trainer: Trainer, text: str, mode: str = "a") -> None:
        """Writes text to losses.csv on rank 0. After the first error nothing more is written, so that the file has no
        gap."""
        if not self._writes_losses or not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / run_folder.LOSSES

        def write() -> None:
            with path.open(mode) as file:
                file.write(text)

        self._writes_losses = attempt(write, path)


def _epochs_done(trainer: Trainer) -> float:
    return (trainer.fit_loop.total_batch_idx + 1) / trainer.num_training_batches


def _mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


class GradientLogger(IntervalCallback):
    """Logs the norm of each parameter's gradient before clipping and, in TensorBoard, histograms of the gradients
    (`--log_gradients`)."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Logs the gradients of a step at which the curves have a point. Lightning calls this method on every rank."""
        hooks = hooks_of(trainer.strategy)
        if not self.is_point(trainer, trainer.global_step + 1) or not hooks.ends_step():
            return
        gradients = {name.removeprefix("net."): gradient for name, gradient in hooks.gradients(pl_module).items()}
        log_scalars(trainer, {f"grad_norm/{name}": gradient.norm().item() for name, gradient in gradients.items()})
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                histogram = logger.experiment.add_histogram
                for name, gradient in gradients.items():
                    write_to(logger, histogram, f"gradients/{name}", gradient, trainer.global_step)


class Experts(IntervalCallback):
    """Writes the moe/* curves, which show how each mixture of experts distributes its tokens. Nothing is copied from
    the device between two points of the curves."""

    def __init__(self) -> None:
        self._newest: list[Any] = []  # for each gate, its `Routing` of the last micro-batch; all have one size
        # For each micro-batch since the newest point and each gate, this has the number of tokens of each expert, int64
        # (E,), and the load-balancing loss, a float32 scalar.
        self._counted: list[list[tuple[Tensor, Tensor]]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self._newest = [gate.routing for gate in pl_module.gates]
        self._counted.append([(routing.tokens, routing.load_balance_loss.detach()) for routing in self._newest])
        super().on_train_batch_end(trainer, pl_module)

    def _log(self, trainer: Trainer) -> None:
        own: list[Tensor] = []
        for routing, counted in zip(self._newest, zip(*self._counted, strict=True), strict=True):
            tokens, losses = zip(*counted, strict=True)
            p = routing.probabilities
            entropy = torch.special.entr(p).sum(dim=1).mean() / math.log(max(2, p.shape[1]))  # relative to its maximum
            means = torch.stack([torch.stack(losses).mean(), entropy])
            own.append(torch.cat([torch.stack(tokens).sum(dim=0).double(), means.double()]))
        # One reduction and one copy to the host for all curves of all mixtures.
        summed = trainer.strategy.reduce(torch.cat(own), reduce_op="sum").cpu().split([len(each) for each in own])
        scalars: dict[str, float] = {}
        micro_batches = len(self._counted)
        for number, (routing, values) in enumerate(zip(self._newest, summed, strict=True)):
            *tokens, load_balance_loss, entropy = values.tolist()
            for expert, count in enumerate(tokens):
                of_step = count / micro_batches * trainer.accumulate_grad_batches
                scalars[f"moe/tokens/mixture_{number}/expert_{expert}"] = of_step
            routes = micro_batches * routing.experts.numel() * trainer.world_size
            scalars[f"moe/dropped/mixture_{number}"] = 1 - sum(tokens) / routes
            scalars[f"moe/load_balance_loss/mixture_{number}"] = load_balance_loss / trainer.world_size
            scalars[f"moe/gate_entropy/mixture_{number}"] = entropy / trainer.world_size
        log_scalars(trainer, scalars)
        self._counted = []
