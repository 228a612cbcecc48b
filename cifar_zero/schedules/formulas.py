"""What several schedules are made of."""

from __future__ import annotations

import math


def share_done(step: float, total: float) -> float:
    """How much of a way is behind, from 0 to 1, where it stays."""
    return min(max(step / total, 0.0), 1.0) if total > 0 else 1.0


def cosine(start: float, end: float, share: float) -> float:
    """From one learning rate to another, down half a wave of the cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
