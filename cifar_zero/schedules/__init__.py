"""The registry of learning-rate schedules: each a dataclass whose fields are the `--schedule.<option>` flags.

A schedule is a closed formula, the learning rate of optimizer step k (from 0): a resumed run needs no more than k.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cifar_zero.schedules import plain
from cifar_zero.schedules.plain import FiniteSchedule, Schedule

SCHEDULES: dict[str, type[Schedule]] = {
    "constant": plain.Constant,
    "linear": plain.Linear,
    "exponential": plain.Exponential,
    "cosine": plain.Cosine,
    "cosine_restarts": plain.CosineRestarts,
    "step": plain.Step,
    "onecycle": plain.OneCycle,
    "warmup_linear": plain.WarmupLinear,
    "warmup_cosine": plain.WarmupCosine,
    "warmup_lr": plain.WarmupLR,
    "warmup_decay_lr": plain.WarmupDecayLR,
    "warmup_cosine_lr": plain.WarmupCosineLR,
    "range_test": plain.RangeTest,
}


def settled(schedule: Schedule, steps: Callable[[], float]) -> Schedule:
    """Returns the schedule with its end known; `steps` returns the optimizer steps of the run, if they matter. Raises
    ValueError if the run has no end."""
    if not isinstance(schedule, FiniteSchedule) or schedule.total_steps:
        return schedule
    total: Any = steps()
    if not 0 < total < math.inf:
        raise ValueError("total_steps must be given for a run without an end")
    return replace(schedule, total_steps=int(total))
