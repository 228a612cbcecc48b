"""The registry of learning-rate schedules: each a dataclass whose fields are the `--schedule.<option>` flags.

A schedule is a closed formula, the learning rate of optimizer step k (from 0): a resumed run needs no more than k.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cifar_zero.schedules.base import FiniteSchedule, Schedule
from cifar_zero.schedules.deepspeed import WarmupCosineLR, WarmupDecayLR, WarmupLR
from cifar_zero.schedules.plain import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    OneCycle,
    RangeTest,
    Step,
    WarmupCosine,
    WarmupLinear,
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


def settled(schedule: Schedule, steps: Callable[[], float]) -> Schedule:
    """Returns the schedule with its end known.

    Args:
        schedule: if it is finite, its `total_steps` may be 0.
        steps: returns the optimizer steps of the run; called only where they matter.

    Raises:
        ValueError: the run has no end.
    """
    if not isinstance(schedule, FiniteSchedule) or schedule.total_steps:
        return schedule
    total: Any = steps()
    if not 0 < total < math.inf:
        raise ValueError("total_steps must be given for a run without an end")
    return replace(schedule, total_steps=int(total))
