"""Schedules that begin at the optimizer's learning rate, or a share of it, and fall or stay: torch's."""

from __future__ import annotations

from dataclasses import dataclass

from cifar_zero.core.ranges import check_range
from cifar_zero.schedules.formulas import cosine, share_done


@dataclass
class Constant:
    """the optimizer's learning rate throughout"""

    def rate(self, step: float, base_lr: float) -> float:
        """Learning rate of optimizer step `step`."""
        return base_lr


@dataclass
class Linear:
    """in a straight line from one share of the learning rate to another (torch's LinearLR)"""

    start_factor: float = 1.0
    """Share of the optimizer's learning rate at the first step."""

    end_factor: float = 0.0
    """Share of it after total_steps, and from there on."""

    total_steps: int = 0
    """Optimizer steps until the end; 0: those of the run."""

    def __post_init__(self) -> None:
        check_range(self, "start_factor", "end_factor", "total_steps")

    def rate(self, step: float, base_lr: float) -> float:
        """Learning rate of optimizer step `step`."""
        share = share_done(step, self.total_steps)
        return base_lr * (self.start_factor + (self.end_factor - self.start_factor) * share)


@dataclass
class Exponential:
    """times one factor after every optimizer step (torch's ExponentialLR)"""

    gamma: float = 0.9999
    """The factor: 0.9999 leaves a third after 11,000 steps."""

    def __post_init__(self) -> None:
        check_range(self, "gamma")

    def rate(self, step: float, base_lr: float) -> float:
        """Learning rate of optimizer step `step`."""
        return base_lr * self.gamma**step


@dataclass
class Cosine:
    """down half a wave of the cosine (torch's CosineAnnealingLR; Loshchilov and Hutter 2017, without restarts)"""

    min_lr: float = 0.0
    """Learning rate after total_steps, and from there on."""

    total_steps: int = 0
    """Optimizer steps until the end; 0: those of the run."""

    def __post_init__(self) -> None:
        check_range(self, "min_lr", "total_steps")

    def rate(self, step: float, base_lr: float) -> float:
        """Learning rate of optimizer step `step`."""
        return cosine(base_lr, self.min_lr, share_done(step, self.total_steps))


@dataclass
class Step:
    """times a factor after every so many optimizer steps (torch's StepLR)"""

    step_size: int = 10_000
    """Optimizer steps between two falls."""

    gamma: float = 0.1
    """The factor."""

    def __post_init__(self) -> None:
        check_range(self, "gamma")
        check_range(self, "step_size", over=0)

    def rate(self, step: float, base_lr: float) -> float:
        """Learning rate of optimizer step `step`."""
        return base_lr * self.gamma ** (step // self.step_size)
