"""The global L2 norm of the gradient of an optimizer step, over all parameters and before clipping."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

from cifar_zero.strategies.norm import global_norm


def norm_before_step(trainer: Trainer, module: LightningModule) -> Tensor | None:
    """The norm of the gradients that the coming step applies, to be called in `on_before_optimizer_step`.

    A float32 scalar on the rank's device, the same on every rank; None where DeepSpeed has taken the gradients over and
    computes the norm in its step.
    """
    engine = _engine(trainer)
    if engine is not None and engine.zero_optimization():
        return None
    norm = global_norm(module.parameters())
    if norm is not None and engine is not None and engine.fp16_enabled():
        return norm / engine.optimizer.loss_scale
    return norm


def norm_after_step(trainer: Trainer) -> float | None:
    """The norm that DeepSpeed's optimizer computed in the last step; None without DeepSpeed.

    At stage 0 DeepSpeed (0.19.8) has none in float32 (its issue 7255), and in float16 without its FusedAdam one that is
    not divided by the loss scale: there `norm_before_step` gives it.
    """
    engine = _engine(trainer)
    norm = None if engine is None else engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def _engine(trainer: Trainer) -> Any:
    return trainer.strategy.deepspeed_engine if isinstance(trainer.strategy, DeepSpeedStrategy) else None
