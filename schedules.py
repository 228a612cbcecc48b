"""The registry of learning-rate schedules: each a dataclass whose fields are the `--schedule.<option>` flags.

A schedule is a closed formula, the learning rate of optimizer step k (from 0): a resumed run needs no more than k.
Those that come to an end have `total_steps`, where 0 stands for the run's own number of steps (`settled`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass
class Constant:
    """the optimizer's learning rate throughout"""

    def rate(self, step: int, base_lr: float) -> float:
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
        _check_not_negative(self, "start_factor", "end_factor", "total_steps")

    def rate(self, step: int, base_lr: float) -> float:
        """Learning rate of optimizer step `step`."""
        share = _share(step, self.total_steps)
        return base_lr * (self.start_factor + (self.end_factor - self.start_factor) * share)


@dataclass
class Exponential:
    """times one factor after every optimizer step (torch's ExponentialLR)"""

    gamma: float = 0.9999
    """The factor: 0.9999 leaves a third after 11,000 steps."""

    def __post_init__(self) -> None:
        _check_not_negative(self, "gamma")

    def rate(self, step: int, base_lr: float) -> float:
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
        _check_not_negative(self, "min_lr", "total_steps")

    def rate(self, step: int, base_lr: float) -> float:
        """Learning rate of optimizer step `step`."""
        return _cosine(base_lr, self.min_lr, _share(step, self.total_steps))


@dataclass
class Step:
    """times a factor after every so many optimizer steps (torch's StepLR)"""

    step_size: int = 10_000
    """Optimizer steps between two falls."""

    gamma: float = 0.1
    """The factor."""

    def __post_init__(self) -> None:
        _check_not_negative(self, "gamma")
        _check_positive(self, "step_size")

    def rate(self, step: int, base_lr: float) -> float:
        """Learning rate of optimizer step `step`."""
        return base_lr * self.gamma ** (step // self.step_size)


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
        _check_not_negative(self, "total_steps")
        _check_positive(self, "div_factor", "final_div_factor")
        if not 0 < self.pct_start < 1:
            raise ValueError(f"pct_start must be over 0 and under 1, not {self.pct_start}")

    def rate(self, step: int, base_lr: float) -> float:
        """Learning rate of optimizer step `step`; the momentum is not cycled."""
        first = base_lr / self.div_factor
        top, end = self.pct_start * self.total_steps - 1, self.total_steps - 1
        if step <= top:
            return self._between(first, base_lr, _share(step, top))
        return self._between(base_lr, first / self.final_div_factor, _share(step - top, end - top))

    def _between(self, start: float, end: float, share: float) -> float:
        return _cosine(start, end, share) if self.anneal_strategy == "cos" else (end - start) * share + start


@dataclass
class WarmupLinear:
    """from 0 up to the optimizer's learning rate, then in a straight line down to 0"""

    warmup_steps: int = 500
    """Optimizer steps of the rise."""

    total_steps: int = 0
    """Optimizer steps until the end; 0: those of the run."""

    def __post_init__(self) -> None:
        _check_not_negative(self, "warmup_steps", "total_steps")

    def rate(self, step: int, base_lr: float) -> float:
        """Learning rate of optimizer step `step`: transformers' get_linear_schedule_with_warmup."""
        if step < self.warmup_steps:
            return base_lr * step / self.warmup_steps
        return base_lr * (1 - _share(step - self.warmup_steps, self.total_steps - self.warmup_steps))


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
        _check_not_negative(self, "warmup_steps", "min_lr", "total_steps")

    def rate(self, step: int, base_lr: float) -> float:
        """Learning rate of optimizer step `step`: transformers' get_cosine_schedule_with_warmup."""
        if step < self.warmup_steps:
            return base_lr * step / self.warmup_steps
        return _cosine(base_lr, self.min_lr, _share(step - self.warmup_steps, self.total_steps - self.warmup_steps))


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
        _check_positive(self, "warmup_num_steps")
        _check_not_negative(self, "warmup_min_lr")

    def rate(self, step: int, base_lr: float) -> float:
        """As DeepSpeed's WarmupLR gives it (deepspeed/runtime/lr_schedules.py, 0.19.8), to the last bit."""
        gamma = _deepspeed_warmup(step, self.warmup_num_steps, self.warmup_type)
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
        _check_positive(self, "warmup_num_steps")
        _check_not_negative(self, "warmup_min_lr", "total_steps")

    def rate(self, step: int, base_lr: float) -> float:
        """As DeepSpeed's WarmupDecayLR gives it (deepspeed/runtime/lr_schedules.py, 0.19.8), to the last bit."""
        gamma = _deepspeed_warmup(step, self.warmup_num_steps, self.warmup_type)
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
        _check_positive(self, "warmup_num_steps")
        _check_not_negative(self, "warmup_min_ratio", "cos_min_ratio", "total_steps")

    def rate(self, step: int, base_lr: float) -> float:
        """As DeepSpeed's WarmupCosineLR gives it (deepspeed/runtime/lr_schedules.py, 0.19.8), to the last bit."""
        if step == 0:
            return 0.0
        gamma = _deepspeed_warmup(step, self.warmup_num_steps, self.warmup_type)
        if gamma is not None:
            return base_lr * (self.warmup_min_ratio + gamma * (1.0 - self.warmup_min_ratio))
        warmup_num_steps = max(2, self.warmup_num_steps)
        share = min(1.0, (step - warmup_num_steps) / max(1, self.total_steps - warmup_num_steps))
        wave = (1 + math.cos(math.pi * share)) / 2
        return base_lr * max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * wave)


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
        _check_positive(self, "min_lr", "max_lr")
        _check_not_negative(self, "total_steps")

    def rate(self, step: int, base_lr: float) -> float:
        """Learning rate of optimizer step `step`."""
        return self.min_lr * (self.max_lr / self.min_lr) ** _share(step, self.total_steps - 1)


def settled(schedule: Schedule, steps: Callable[[], float]) -> Schedule:
    """A schedule that knows where it ends.

    Args:
        schedule: whose `total_steps`, if it has such, may be 0.
        steps: gives the optimizer steps of the run; only asked where they matter.

    Raises:
        ValueError: the run has no end.
    """
    if getattr(schedule, "total_steps", None) != 0:
        return schedule
    total: Any = steps()
    if not 0 < total < math.inf:
        raise ValueError("total_steps must be given for a run without an end")
    return replace(schedule, total_steps=int(total))


def _share(step: float, total: float) -> float:
    """How much of a way is behind, from 0 to 1, where it stays."""
    return min(max(step / total, 0.0), 1.0) if total > 0 else 1.0


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def _deepspeed_warmup(step: int, warmup_num_steps: int, warmup_type: str) -> float | None:
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


def _check_not_negative(schedule: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(schedule, name) < math.inf:
            raise ValueError(f"{name} must be finite and not negative, not {getattr(schedule, name)}")


def _check_positive(schedule: Any, *names: str) -> None:
    for name in names:
        if not 0 < getattr(schedule, name) < math.inf:
            raise ValueError(f"{name} must be greater than 0, not {getattr(schedule, name)}")


Schedule = (
    Constant
    | Linear
    | Exponential
    | Cosine
    | Step
    | OneCycle
    | WarmupLinear
    | WarmupCosine
    | WarmupLR
    | WarmupDecayLR
    | WarmupCosineLR
    | RangeTest
)

SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "exponential": Exponential,
    "cosine": Cosine,
    "step": Step,
    "onecycle": OneCycle,
    "warmup_linear": WarmupLinear,
    "warmup_cosine": WarmupCosine,
    "warmup_lr": WarmupLR,
    "warmup_decay_lr": WarmupDecayLR,
    "warmup_cosine_lr": WarmupCosineLR,
    "range_test": RangeTest,
}
