"""Defines the registry of learning-rate schedules. Each entry is a dataclass whose fields are the `--schedule.<option>`
flags.

The registry has schedules of torch and transformers, DeepSpeed's schedules with a warm-up, and a range test. A schedule
is a closed formula for the learning rate of optimizer step k (from 0), so a resumed run needs only k.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from cifar_zero.core.usage import Options, limited


@dataclass
class Schedule(Options):
    """Computes a learning rate for each optimizer step."""

    def rate(self, step: float, base_lr: float) -> float:
        """Returns the learning rate of optimizer step `step`, counted from 0. `base_lr` is the optimizer's learning
        rate."""
        raise NotImplementedError


@dataclass
class FiniteSchedule(Schedule):
    """A schedule that ends after a number of optimizer steps."""

    total_steps: int = 0
    """Optimizer steps until the end of the schedule. 0: all optimizer steps of the run."""


def share_done(step: float, total: float) -> float:
    """Returns the share of `total` steps that are done, from 0 to 1. It is 1 after the last step, and if `total` is at
    most 0."""
    return min(max(step / total, 0.0), 1.0) if total > 0 else 1.0


def cosine(start: float, end: float, share: float) -> float:
    """Returns the value of half a cosine wave from `start` to `end`, at the position `share` (0 to 1) of its length."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


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
    """Share of the optimizer's learning rate from total_steps on."""

    def rate(self, step: float, base_lr: float) -> float:
        share = share_done(step, self.total_steps)
        return base_lr * (self.start_factor + (self.end_factor - self.start_factor) * share)


@dataclass
class Exponential(Schedule):
    """multiplied by one factor after every optimizer step (torch's ExponentialLR)"""

    gamma: float = 0.9999
    """Factor of each optimizer step; 0.9999 leaves a third of the learning rate after 11,000 steps."""

    def rate(self, step: float, base_lr: float) -> float:
        return base_lr * self.gamma**step


@dataclass
class Cosine(FiniteSchedule):
    """down half a cosine wave (torch's CosineAnnealingLR; Loshchilov and Hutter 2017, without restarts)"""

    min_lr: float = 0.0
    """Learning rate from total_steps on."""

    def rate(self, step: float, base_lr: float) -> float:
        return cosine(base_lr, self.min_lr, share_done(step, self.total_steps))


@dataclass
class CosineRestarts(Schedule):
    """down half a cosine wave again and again (torch's CosineAnnealingWarmRestarts; Loshchilov and Hutter 2017)"""

    period: int = limited(1000, over=0)
    """Optimizer steps of the first wave."""

    period_factor: int = limited(2, at_least=1)
    """Each wave is this many times as long as the one before."""

    min_lr: float = 0.0
    """Learning rate at the end of a wave."""

    def rate(self, step: float, base_lr: float) -> float:
        period = self.period
        while step >= period:
            step, period = step - period, period * self.period_factor
        return cosine(base_lr, self.min_lr, step / period)


@dataclass
class Step(Schedule):
    """multiplied by a factor once every `step_size` optimizer steps (torch's StepLR)"""

    step_size: int = limited(10_000, over=0)
    """Optimizer steps between two drops."""

    gamma: float = 0.1
    """Factor of each drop."""

    def rate(self, step: float, base_lr: float) -> float:
        return base_lr * self.gamma ** (step // self.step_size)


@dataclass
class OneCycle(FiniteSchedule):
    """one rise to the optimizer's learning rate, then a fall to almost 0 (torch's OneCycleLR, cycle_momentum=False)"""

    pct_start: float = limited(0.3, over=0, below=1)
    """Share of the steps in which the learning rate rises."""

    anneal_strategy: Literal["cos", "linear"] = "cos"
    """Shape of the rise and of the fall."""

    div_factor: float = limited(25.0, over=0)
    """The first learning rate is the optimizer's learning rate divided by this number."""

    final_div_factor: float = limited(1e4, over=0)
    """The last learning rate is the first one divided by this number."""

    def rate(self, step: float, base_lr: float) -> float:
        first = base_lr / self.div_factor
        top, end = self.pct_start * self.total_steps - 1, self.total_steps - 1
        if step <= top:
            return self._between(first, base_lr, share_done(step, top))
        return self._between(base_lr, first / self.final_div_factor, share_done(step - top, end - top))

    def _between(self, start: float, end: float, share: float) -> float:
        if self.anneal_strategy == "cos":
            return cosine(start, end, share)
        return (end - start) * share + start


@dataclass
class WarmupLinear(FiniteSchedule):
    """from 0 up to the optimizer's learning rate, then in a straight line down to 0"""

    warmup_steps: int = 500
    """Optimizer steps in which the learning rate rises."""

    def rate(self, step: float, base_lr: float) -> float:  # transformers' get_linear_schedule_with_warmup
        if step < self.warmup_steps:
            return base_lr * step / self.warmup_steps
        return self.fall(base_lr, share_done(step - self.warmup_steps, self.total_steps - self.warmup_steps))

    def fall(self, base_lr: float, share: float) -> float:
        """Returns the learning rate after the given share (0 to 1) of the steps that follow the rise."""
        return base_lr * (1 - share)


@dataclass
class WarmupCosine(WarmupLinear):
    """from 0 up to the optimizer's learning rate, then down half a cosine wave"""

    min_lr: float = 0.0
    """Learning rate from total_steps on."""

    def fall(self, base_lr: float, share: float) -> float:  # transformers' get_cosine_schedule_with_warmup
        return cosine(base_lr, self.min_lr, share)


@dataclass
class RangeTest(FiniteSchedule):
    """exponentially from a very small learning rate to a large one, for a learning-rate range test (Smith 2017)"""

    min_lr: float = limited(1e-6, over=0)
    """Learning rate of the first step, whatever the optimizer's learning rate is."""

    max_lr: float = limited(1.0, over=0)
    """Learning rate of the last step."""

    def rate(self, step: float, base_lr: float) -> float:
        return self.min_lr * (self.max_lr / self.min_lr) ** share_done(step, self.total_steps - 1)


@dataclass
class WarmupLR(Schedule):
    """DeepSpeed's WarmupLR: from warmup_min_lr up to the optimizer's learning rate, then constant"""

    warmup_num_steps: int = limited(1000, over=0)
    """Optimizer steps until the full learning rate."""

    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the rise."""

    warmup_min_lr: float = 0.0
    """Lowest learning rate, at the start and, for WarmupDecayLR, also at the end."""

    def rate(self, step: float, base_lr: float) -> float:
        return self.warmup_min_lr + (base_lr - self.warmup_min_lr) * self._share(step)

    def _share(self, step: float) -> float:
        """Returns how much of the rise from warmup_min_lr to the optimizer's learning rate is done at a step, from 0 to
        1, bit for bit as in DeepSpeed (deepspeed/runtime/lr_schedules.py, 0.19.8). DeepSpeed's counter starts at -1 and
        is read before a step, so steps 0 and 1 both have the lowest learning rate."""
        iteration, warmup_num_steps = step - 1, max(2, self.warmup_num_steps)
        if iteration >= warmup_num_steps:
            return self._after(step)
        if iteration < 0:
            return 0.0
        if self.warmup_type == "log":
            return (1.0 / math.log(warmup_num_steps)) * math.log(iteration + 1)
        return iteration / warmup_num_steps

    def _after(self, step: float) -> float:
        """Returns what `_share` returns at a step after the rise, where the learning rate is constant or falls
        again."""
        return 1.0


@dataclass
class WarmupDecayLR(FiniteSchedule, WarmupLR):
    """DeepSpeed's WarmupDecayLR: like WarmupLR, then in a straight line down to warmup_min_lr"""

    def _after(self, step: float) -> float:
        falling = max(1, self.total_steps - max(2, self.warmup_num_steps))
        return max(0.0, (self.total_steps - (step - 1)) / falling)


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "exponential": Exponential,
    "cosine": Cosine,
    "cosine_restarts": CosineRestarts,
    "step": Step,
    "onecycle": OneCycle,
    "warmup_linear": WarmupLinear,
    "warmup_cosine": WarmupCosine,
    "warmup_lr": WarmupLR,
    "warmup_decay_lr": WarmupDecayLR,
    "range_test": RangeTest,
}


def with_total_steps(schedule: Schedule, steps: Callable[[], float]) -> Schedule:
    """Returns a copy of the schedule in which `total_steps` is the number of optimizer steps of the run, if the
    schedule has this option and its value is 0. Otherwise returns the schedule itself, without calling `steps`, which
    returns the number. Raises ValueError if the schedule needs the number and the run has no end."""
    if not isinstance(schedule, FiniteSchedule) or schedule.total_steps:
        return schedule
    total: Any = steps()
    if not 0 < total < math.inf:
        raise ValueError("total_steps must be given for a run without an end")
    return replace(schedule, total_steps=int(total))
