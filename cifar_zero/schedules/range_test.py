"""The schedule of --find_lr."""

from __future__ import annotations

from dataclasses import dataclass

from cifar_zero.core.ranges import check_range
from cifar_zero.schedules.formulas import share_done


@dataclass
class RangeTest:
    """ever faster from a very small learning rate to a large one, which --find_lr runs through (Smith 2017)"""

    min_lr: float = 1e-6
    """Learning rate of the first step, whatever the optimizer's."""

    max_lr: float = 1.0
    """Learning rate of the last step."""

    total_steps: int = 0
    """Optimizer steps between them; 0: those of the run."""

    def __post_init__(self) -> None:
        check_range(self, "min_lr", "max_lr", over=0)
        check_range(self, "total_steps")

    def rate(self, step: float, base_lr: float) -> float:
        """Learning rate of optimizer step `step`."""
        return self.min_lr * (self.max_lr / self.min_lr) ** share_done(step, self.total_steps - 1)
