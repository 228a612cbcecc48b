"""The global L2 norm of the gradient of an optimizer step, over all parameters and before clipping."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor


def norm_before_step(trainer: Trainer, module: LightningModule) -> Tensor | None:
    """The norm of the gradients that the coming step applies, to be called in `on_before_optimizer_step`.

    A float32 scalar on the rank's device, the same on every rank; None where DeepSpeed has taken the gradients over and
    computes the norm in its step.
    """
    engine = _engine(trainer)
    if engine is not None and engine.zero_optimization():
        return None
    if isinstance(trainer.strategy, FSDPStrategy):
        # Each rank holds a part: torch's own method adds the parts up, and an infinite limit clips nothing.
        return trainer.strategy.model.clip_grad_norm_(math.inf)  # pyright: ignore
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if not gradients:
        return None
    # torch's get_total_norm would round the norm of each gradient to the gradient's type.
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients])
    scale = engine.optimizer.loss_scale if engine is not None and engine.fp16_enabled() else 1.0
    return torch.linalg.vector_norm(norms) / scale


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
