"""Records what a training does at each optimizer step: loss, learning rates, gradients and weights."""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from cifar_zero.comparison.recorded.record import Record, Tensors
from cifar_zero.launch.collectives import gather
from cifar_zero.strategies import own


class Recording(Callback):
    """Fills a record; every rank has the whole.

    Args:
        steps: the first optimizer steps whose gradients and weights are recorded.
    """

    def __init__(self, steps: int):
        self.record = Record()
        self._steps = steps
        self._losses: list[Tensor] = []
        self._at_step = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the initial weights, as the strategy holds them."""
        self.record.weights.append(_named(trainer, pl_module, _weight, frozen=True))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Records the gradients: summed over micro-batches and ranks, not yet clipped."""
        # DeepSpeed's engine is asked to step after every micro-batch.
        self._at_step = self._ends_step(trainer)
        if not self._at_step:
            return
        self.record.rates.append([float(group["lr"]) for group in optimizer.param_groups])
        if len(self.record.gradients) < self._steps:
            self.record.gradients.append(_named(trainer, pl_module, _gradient))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        """Records the loss of a micro-batch, and after the last one of a step the weights."""
        self._losses.append(outputs["loss"].float())
        if not self._at_step:
            return
        self._at_step = False
        if len(self.record.weights) <= self._steps:
            self.record.weights.append(_named(trainer, pl_module, _weight, frozen=True))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds up the losses over micro-batches and ranks."""
        # Lightning (2.6.6) hands out the loss divided by accumulate_grad_batches: the sum of a step's is its mean.
        by_step = torch.stack(self._losses).view(-1, trainer.accumulate_grad_batches).sum(dim=1)
        self.record.losses = trainer.strategy.reduce(by_step, reduce_op="mean").tolist()

    @staticmethod
    def _ends_step(trainer: Trainer) -> bool:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            engine: Any = trainer.strategy.deepspeed_engine
            return engine.is_gradient_accumulation_boundary()
        return True


def _named(trainer: Trainer, module: LightningModule, value: Any, frozen: bool = False) -> Tensors:
    """Returns a value of each parameter by its plain name; collective, the experts are gathered from their ranks."""
    scale = getattr(getattr(trainer.strategy, "deepspeed_engine", None), "optimizer", None)
    scale = float(getattr(scale, "loss_scale", 1.0) or 1.0) if value is _gradient else 1.0
    found, spread = {}, {}
    for name, parameter in _parameters(module, frozen):
        tensor = value(parameter) / scale if scale != 1.0 else value(parameter)
        of_this_rank = not getattr(parameter, "allreduce", True)  # DeepSpeed (0.19.8) marks experts in this way
        (spread if of_this_rank else found)[name] = tensor.detach().cpu().clone()
    plain = own(trainer.strategy).plain_names([*found, *spread])
    named = {plain[name]: tensor for name, tensor in found.items()}
    for experts in gather({plain[name]: tensor for name, tensor in spread.items()}) if spread else ():
        named |= experts
    return named


def _parameters(module: LightningModule, frozen: bool) -> Iterator[tuple[str, Any]]:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad or frozen:
            yield name, parameter


def _gradient(parameter: Any) -> Tensor:
    gradient = safe_get_full_grad(parameter)
    if gradient is None:
        return torch.zeros(getattr(parameter, "ds_shape", parameter.shape))
    return _whole(gradient).float()


def _weight(parameter: Any) -> Tensor:
    whole = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
    if whole is not None:
        return whole
    with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return _whole(parameter.detach()).clone()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
