"""Schedules that rise to the optimizer's learning rate and fall again: torch's and transformers'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cifar_zero.core.ranges import check_range
from cifar_zero.schedules.formulas import cosine, share_done


@dataclass
class OneCycle:
    """up to the optimizer's learning rate and far down again (torch's OneCycleLR; Smith and Topin 2018)"""

    pct_start: float = 0.3
    """Share of the steps that go up."""

    anneal_strategy: Literal["cos", "linear"] = "cos"
    """Shape of both ways."""

    div_factor: float = 25.0
    """The first learning rate is the optimizer's divided by this."""

    final_div_factor: float = 1e4
    """The last learning rate is the first one divided by this."""

    total_steps: int = 0
    """Optimizer steps until the end; 0: those of the run."""

    def __post_init__(self) -> None:
        check_range(self, "total_steps")
        check_range(self, "div_factor", "final_div_factor", over=0)
        check_range(self, "pct_start", over=0, below=1)

    def rate(self, step: float, base_lr: float) -> float:
        """Learning rate of optimizer step `step`; the momentum is not cycled."""
        first = base_lr / self.div_factor
        top, end = self.pct_start * self.total_steps - 1, self.total_steps - 1
        if step <= top:
            return self._between(first, base_lr, share_done(step, top))
        return self._between(base_lr, first / self.final_div_factor, share_done(step - top, end - top))

    def _between(self, start: float, end: float, share: float) -> float:
        return cosine(start, end, share) if self.anneal_strategy == "cos" else (end - start) * share + start


@dataclass
class WarmupLinear:
    """from 0 up to the optimizer's learning rate, then in a straight line down to 0"""

    warmup_steps: int = 500
    """Optimizer steps of the rise."""

    total_steps: int = 0
    """Optimizer steps until the end; 0: those of the run."""

    def __post_init__(self) -> None:
        check_range(self, "warmup_steps", "total_steps")

    def rate(self, step: float, base_lr: float) -> float:
        """Learning rate of optimizer step `step`: transformers' get_linear_schedule_with_warmup."""
        if step < self.warmup_steps:
            return base_lr * step / self.warmup_steps
        return base_lr * (1 - share_done(step - self.warmup_steps, self.total_steps - self.warmup_steps))


@dataclass
class WarmupCosine:
    """from 0 up to the optimizer's learning rate, then down half a wave of the cosine"""

    warmup_steps: int = 500
    """Optimizer steps of the rise."""

    min_lr: float = 0.0
    """Learning rate after total_steps, and from there on."""

    total_steps: int = 0
    """Optimizer steps until the end; 0: those of the run."""

    def __post_init__(self) -> None:
        check_range(self, "warmup_steps", "min_lr", "total_steps")

    def rate(self, step: float, base_lr: float) -> float:
        """Learning rate of optimizer step `step`: transformers' get_cosine_schedule_with_warmup."""
        if step < self.warmup_steps:
            return base_lr * step / self.warmup_steps
        return cosine(base_lr, self.min_lr, share_done(step - self.warmup_steps, self.total_steps - self.warmup_steps))
