"""Gradients and weights of a step as whole tensors by their plain names, under every strategy; imports DeepSpeed."""

from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from cifar_zero.launch.collectives import gather
from cifar_zero.strategies import own
from cifar_zero.training.callbacks.averaging import is_spread
from cifar_zero.training.callbacks.curves import deepspeed_engine


def ends_step(trainer: Trainer) -> bool:
    """Returns whether `on_before_optimizer_step` belongs to a step: DeepSpeed calls it for every micro-batch."""
    engine = deepspeed_engine(trainer)
    return engine is None or engine.is_gradient_accumulation_boundary()


def gradients(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """Returns the gradients before clipping, float32 on the CPU, of all that is trained; collective."""
    optimizer = getattr(deepspeed_engine(trainer), "optimizer", None)
    scale = float(getattr(optimizer, "loss_scale", 1.0) or 1.0)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    return _named(trainer, {name: (parameter, _gradient(parameter) / scale) for name, parameter in trained.items()})


def weights(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """Returns the weights on the CPU, of the optimizer's precision; collective."""
    return _named(trainer, {name: (parameter, _weight(parameter)) for name, parameter in module.named_parameters()})


def _named(trainer: Trainer, tensors: dict[str, tuple[Any, Tensor]]) -> dict[str, Tensor]:
    """Returns tensors by their plain names; the experts are gathered from their ranks."""
    plain = own(trainer.strategy).plain_names([*tensors])
    found, spread = {}, {}
    for name, (parameter, tensor) in tensors.items():
        (spread if is_spread(parameter) else found)[plain[name]] = tensor.detach().cpu().clone()
    for experts in gather(spread) if spread else ():
        found |= experts
    return found


def _gradient(parameter: Any) -> Tensor:
    gradient = safe_get_full_grad(parameter)
    # Next to BF16_Optimizer (ZeRO 0 of DeepSpeed 0.17.5 and older) parameter.grad is this rank's own.
    gradient = parameter._hp_grad.view_as(parameter) if hasattr(parameter, "_hp_grad") else gradient
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
