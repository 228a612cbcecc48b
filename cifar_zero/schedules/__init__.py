"""The registry of learning-rate schedules: each a dataclass whose fields are the `--schedule.<option>` flags.

A schedule is a closed formula, the learning rate of optimizer step k (from 0): a resumed run needs no more than k.
Those that come to an end have `total_steps`, where 0 stands for the run's own number of steps (`settled`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cifar_zero.schedules.deepspeed import WarmupCosineLR, WarmupDecayLR, WarmupLR
from cifar_zero.schedules.falling import Constant, Cosine, Exponential, Linear, Step
from cifar_zero.schedules.range_test import RangeTest
from cifar_zero.schedules.warmup import OneCycle, WarmupCosine, WarmupLinear

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
