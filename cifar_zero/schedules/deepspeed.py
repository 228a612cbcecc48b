"""DeepSpeed's schedules with a warm-up, equal to its own to the last bit; DeepSpeed itself is not imported.

The formulas are those of deepspeed/runtime/lr_schedules.py, 0.19.8.
"""

import math
from dataclasses import dataclass
from typing import Literal

from cifar_zero.core.usage import limited
from cifar_zero.schedules.plain import FiniteSchedule, Schedule


@dataclass
class _Warmup(Schedule):
    warmup_num_steps: int = limited(1000, over=0)
    """Optimizer steps until the full learning rate."""

    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the rise."""

    def _gamma(self, step: float) -> float | None:
        """Returns the share of the rise; None when the rise is over.

        DeepSpeed's counter starts at -1 and is read before the first step, so that steps 0 and 1 both run at the lowest
        rate.
        """
        iteration, warmup_num_steps = step - 1, max(2, self.warmup_num_steps)
        if iteration >= warmup_num_steps:
            return None
        if iteration < 0:
            return 0.0
        if self.warmup_type == "log":
            return (1.0 / math.log(warmup_num_steps)) * math.log(iteration + 1)
        return iteration / warmup_num_steps


@dataclass
class WarmupLR(_Warmup):
    """DeepSpeed's WarmupLR: from warmup_min_lr up to the optimizer's learning rate, then constant"""

    warmup_min_lr: float = 0.0
    """Lowest learning rate: that of the start and, with WarmupDecayLR, of the end."""

    def rate(self, step: float, base_lr: float) -> float:
        gamma = self._gamma(step)
        return self.warmup_min_lr + (base_lr - self.warmup_min_lr) * (1.0 if gamma is None else gamma)


@dataclass
class WarmupDecayLR(FiniteSchedule, WarmupLR):
    """DeepSpeed's WarmupDecayLR: like its WarmupLR, then in a straight line down to warmup_min_lr"""

    def rate(self, step: float, base_lr: float) -> float:
        gamma = self._gamma(step)
        if gamma is None:
            falling = float(max(1.0, self.total_steps - max(2, self.warmup_num_steps)))
            gamma = max(0.0, float(self.total_steps - (step - 1)) / falling)
        return self.warmup_min_lr + (base_lr - self.warmup_min_lr) * gamma


@dataclass
class WarmupCosineLR(FiniteSchedule, _Warmup):
    """DeepSpeed's WarmupCosineLR: up to the optimizer's learning rate, then down half a cosine wave"""

    warmup_min_ratio: float = 0.0
    """Share of the learning rate at the start; the very first step has none."""

    cos_min_ratio: float = 0.0001
    """Share of the learning rate at the end."""

    def rate(self, step: float, base_lr: float) -> float:
        if step == 0:
            return 0.0
        gamma = self._gamma(step)
        if gamma is not None:
            return base_lr * (self.warmup_min_ratio + gamma * (1.0 - self.warmup_min_ratio))
        warmup_num_steps = max(2, self.warmup_num_steps)
        share = min(1.0, (step - warmup_num_steps) / max(1, self.total_steps - warmup_num_steps))
        wave = (1 + math.cos(math.pi * share)) / 2
        return base_lr * max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * wave)
