"""DeepSpeed's schedules with a warm-up, to the last bit; DeepSpeed itself is not imported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cifar_zero.core.ranges import check_range


@dataclass
class WarmupLR:
    """DeepSpeed's WarmupLR: from warmup_min_lr up to the optimizer's learning rate, then constant"""

    warmup_min_lr: float = 0.0
    """Learning rate at the start."""

    warmup_num_steps: int = 1000
    """Optimizer steps until the full learning rate."""

    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the rise."""

    def __post_init__(self) -> None:
        check_range(self, "warmup_num_steps", over=0)
        check_range(self, "warmup_min_lr")

    def rate(self, step: float, base_lr: float) -> float:
        """As DeepSpeed's WarmupLR gives it (deepspeed/runtime/lr_schedules.py, 0.19.8), to the last bit."""
        gamma = _warmup(step, self.warmup_num_steps, self.warmup_type)
        return self.warmup_min_lr + (base_lr - self.warmup_min_lr) * (1.0 if gamma is None else gamma)


@dataclass
class WarmupDecayLR:
    """DeepSpeed's WarmupDecayLR: as its WarmupLR, then in a straight line down to warmup_min_lr"""

    warmup_min_lr: float = 0.0
    """Learning rate at the start and at the end."""

    warmup_num_steps: int = 1000
    """Optimizer steps until the full learning rate."""

    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the rise."""

    total_steps: int = 0
    """Optimizer steps until the end; 0: those of the run."""

    def __post_init__(self) -> None:
        check_range(self, "warmup_num_steps", over=0)
        check_range(self, "warmup_min_lr", "total_steps")

    def rate(self, step: float, base_lr: float) -> float:
        """As DeepSpeed's WarmupDecayLR gives it (deepspeed/runtime/lr_schedules.py, 0.19.8), to the last bit."""
        gamma = _warmup(step, self.warmup_num_steps, self.warmup_type)
        if gamma is None:
            falling = float(max(1.0, self.total_steps - max(2, self.warmup_num_steps)))
            gamma = max(0.0, float(self.total_steps - (step - 1)) / falling)
        return self.warmup_min_lr + (base_lr - self.warmup_min_lr) * gamma


@dataclass
class WarmupCosineLR:
    """DeepSpeed's WarmupCosineLR: up to the optimizer's learning rate, then down half a wave of the cosine"""

    warmup_min_ratio: float = 0.0
    """Share of the learning rate at the start; the very first step has none."""

    warmup_num_steps: int = 1000
    """Optimizer steps until the full learning rate."""

    cos_min_ratio: float = 0.0001
    """Share of the learning rate at the end."""

    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the rise."""

    total_steps: int = 0
    """Optimizer steps until the end; 0: those of the run."""

    def __post_init__(self) -> None:
        check_range(self, "warmup_num_steps", over=0)
        check_range(self, "warmup_min_ratio", "cos_min_ratio", "total_steps")

    def rate(self, step: float, base_lr: float) -> float:
        """As DeepSpeed's WarmupCosineLR gives it (deepspeed/runtime/lr_schedules.py, 0.19.8), to the last bit."""
        if step == 0:
            return 0.0
        gamma = _warmup(step, self.warmup_num_steps, self.warmup_type)
        if gamma is not None:
            return base_lr * (self.warmup_min_ratio + gamma * (1.0 - self.warmup_min_ratio))
        warmup_num_steps = max(2, self.warmup_num_steps)
        share = min(1.0, (step - warmup_num_steps) / max(1, self.total_steps - warmup_num_steps))
        wave = (1 + math.cos(math.pi * share)) / 2
        return base_lr * max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * wave)


def _warmup(step: float, warmup_num_steps: int, warmup_type: str) -> float | None:
    """Share of the rise in DeepSpeed's schedules; None when it is over.

    Their counter starts at -1 and is read before the first step, so that steps 0 and 1 both run at the lowest rate.
    """
    iteration, warmup_num_steps = step - 1, max(2, warmup_num_steps)
    if iteration >= warmup_num_steps:
        return None
    if iteration < 0:
        return 0.0
    if warmup_type == "log":
        return (1.0 / math.log(warmup_num_steps)) * math.log(iteration + 1)
    return iteration / warmup_num_steps
