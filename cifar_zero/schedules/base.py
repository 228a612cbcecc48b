"""What all schedules have in common."""

import math
from dataclasses import dataclass


@dataclass
class Schedule:
    """A learning rate for each optimizer step."""

    def rate(self, step: float, base_lr: float) -> float:
        """Returns the learning rate of optimizer step `step`, from 0; `base_lr` is the optimizer's."""
        raise NotImplementedError


@dataclass
class FiniteSchedule(Schedule):
    """A schedule that ends."""

    total_steps: int = 0
    """Optimizer steps until the end; 0: those of the run."""


def share_done(step: float, total: float) -> float:
    """Returns the share of `total` steps that lies behind, from 0 to 1; 1 after the end."""
    return min(max(step / total, 0.0), 1.0) if total > 0 else 1.0


def cosine(start: float, end: float, share: float) -> float:
    """Returns the value at a share of the way from start to end along half a cosine wave."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
