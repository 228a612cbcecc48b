"""The registry of learning-rate schedules: each a dataclass whose fields are the `--schedule.<option>` flags.

A schedule is a closed formula, the learning rate of optimizer step k (from 0): a resumed run needs no more than k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass
class Constant:
    """the optimizer's learning rate throughout"""

    def rate(self, step: int, base_lr: float) -> float:
        """Learning rate of optimizer step `step`."""
        return base_lr


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
        if self.warmup_num_steps < 1:
            raise ValueError(f"warmup_num_steps must be at least 1, not {self.warmup_num_steps}")
        if self.warmup_min_lr < 0:
            raise ValueError(f"warmup_min_lr must not be negative, not {self.warmup_min_lr}")

    def rate(self, step: int, base_lr: float) -> float:
        """As DeepSpeed's WarmupLR gives it (deepspeed/runtime/lr_schedules.py, 0.19.8), to the last bit.

        Its counter starts at -1 and is read before the first step, so that steps 0 and 1 both run at the lowest rate.
        """
        iteration = step - 1
        warmup_num_steps = max(2, self.warmup_num_steps)
        if iteration < 0:
            gamma = 0.0
        elif iteration >= warmup_num_steps:
            gamma = 1.0
        elif self.warmup_type == "log":
            gamma = (1.0 / math.log(warmup_num_steps)) * math.log(iteration + 1)
        else:
            gamma = iteration / warmup_num_steps
        return self.warmup_min_lr + (base_lr - self.warmup_min_lr) * gamma


Schedule = Constant | WarmupLR

SCHEDULES: dict[str, type[Constant] | type[WarmupLR]] = {"constant": Constant, "warmup_lr": WarmupLR}
