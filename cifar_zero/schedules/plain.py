"""torch's and transformers' schedules, and that of --find_lr, as closed formulas."""

from dataclasses import dataclass
from typing import Literal

from cifar_zero.core.usage import check_range
from cifar_zero.schedules.base import FiniteSchedule, Schedule, cosine, share_done


@dataclass
class Constant(Schedule):
    """the optimizer's learning rate throughout"""

    def rate(self, step: float, base_lr: float) -> float:
        return base_lr


@dataclass
class Linear(FiniteSchedule):
    """in a straight line from one share of the learning rate to another (torch's LinearLR)"""

    start_factor: float = 1.0
    """Share of the optimizer's learning rate at the first step."""

    end_factor: float = 0.0
    """Share of the optimizer's learning rate after total_steps, and from then on."""

    def __post_init__(self) -> None:
        check_range(self, "start_factor", "end_factor", "total_steps")

    def rate(self, step: float, base_lr: float) -> float:
        share = share_done(step, self.total_steps)
        return base_lr * (self.start_factor + (self.end_factor - self.start_factor) * share)


@dataclass
class Exponential(Schedule):
    """multiplied by one factor after every optimizer step (torch's ExponentialLR)"""

    gamma: float = 0.9999
    """The factor: 0.9999 leaves a third after 11,000 steps."""

    def __post_init__(self) -> None:
        check_range(self, "gamma")

    def rate(self, step: float, base_lr: float) -> float:
        return base_lr * self.gamma**step


@dataclass
class Cosine(FiniteSchedule):
    """down half a cosine wave (torch's CosineAnnealingLR; Loshchilov and Hutter 2017, without restarts)"""

    min_lr: float = 0.0
    """Learning rate after total_steps, and from then on."""

    def __post_init__(self) -> None:
        check_range(self, "min_lr", "total_steps")

    def rate(self, step: float, base_lr: float) -> float:
        return cosine(base_lr, self.min_lr, share_done(step, self.total_steps))


@dataclass
class Step(Schedule):
    """multiplied by a factor once every `step_size` optimizer steps (torch's StepLR)"""

    step_size: int = 10_000
    """Optimizer steps between two drops."""

    gamma: float = 0.1
    """The factor."""

    def __post_init__(self) -> None:
        check_range(self, "gamma")
        check_range(self, "step_size", over=0)

    def rate(self, step: float, base_lr: float) -> float:
        return base_lr * self.gamma ** (step // self.step_size)


@dataclass
class OneCycle(FiniteSchedule):
    """up to the optimizer's learning rate and far down again (torch's OneCycleLR; Smith and Topin 2018)"""

    pct_start: float = 0.3
    """Share of the steps in which the learning rate rises."""

    anneal_strategy: Literal["cos", "linear"] = "cos"
    """Shape of the rise and of the fall."""

    div_factor: float = 25.0
    """The first learning rate is the optimizer's divided by this."""

    final_div_factor: float = 1e4
    """The last learning rate is the first one divided by this."""

    def __post_init__(self) -> None:
        check_range(self, "total_steps")
        check_range(self, "div_factor", "final_div_factor", over=0)
        check_range(self, "pct_start", over=0, below=1)

    def rate(self, step: float, base_lr: float) -> float:  # the momentum is not cycled
        first = base_lr / self.div_factor
        top, end = self.pct_start * self.total_steps - 1, self.total_steps - 1
        if step <= top:
            return self._between(first, base_lr, share_done(step, top))
        return self._between(base_lr, first / self.final_div_factor, share_done(step - top, end - top))

    def _between(self, start: float, end: float, share: float) -> float:
        return cosine(start, end, share) if self.anneal_strategy == "cos" else (end - start) * share + start


@dataclass
class WarmupLinear(FiniteSchedule):
    """from 0 up to the optimizer's learning rate, then in a straight line down to 0"""

    warmup_steps: int = 500
    """Optimizer steps of the rise."""

    def __post_init__(self) -> None:
        check_range(self, "warmup_steps", "total_steps")

    def rate(self, step: float, base_lr: float) -> float:  # transformers' get_linear_schedule_with_warmup
        if step < self.warmup_steps:
            return base_lr * step / self.warmup_steps
        return base_lr * (1 - share_done(step - self.warmup_steps, self.total_steps - self.warmup_steps))


@dataclass
class WarmupCosine(FiniteSchedule):
    """from 0 up to the optimizer's learning rate, then down half a cosine wave"""

    warmup_steps: int = 500
    """Optimizer steps of the rise."""

    min_lr: float = 0.0
    """Learning rate after total_steps, and from then on."""

    def __post_init__(self) -> None:
        check_range(self, "warmup_steps", "min_lr", "total_steps")

    def rate(self, step: float, base_lr: float) -> float:  # transformers' get_cosine_schedule_with_warmup
        if step < self.warmup_steps:
            return base_lr * step / self.warmup_steps
        return cosine(base_lr, self.min_lr, share_done(step - self.warmup_steps, self.total_steps - self.warmup_steps))


@dataclass
class RangeTest(FiniteSchedule):
    """exponentially from a very small learning rate to a large one, the schedule of --find_lr (Smith 2017)"""

    min_lr: float = 1e-6
    """Learning rate of the first step, whatever the optimizer's."""

    max_lr: float = 1.0
    """Learning rate of the last step."""

    def __post_init__(self) -> None:
        check_range(self, "min_lr", "max_lr", over=0)
        check_range(self, "total_steps")

    def rate(self, step: float, base_lr: float) -> float:
        return self.min_lr * (self.max_lr / self.min_lr) ** share_done(step, self.total_steps - 1)
