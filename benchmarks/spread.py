"""Statistics of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """What is told of a figure that was measured several times: the least, the middle and the greatest value."""

    minimum: float
    median: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(min(values), statistics.median(values), max(values))

    def __str__(self) -> str:
        return " / ".join(map(number, (self.minimum, self.median, self.maximum)))


def paired_ratios(numerators: Sequence[float | None], denominators: Sequence[float | None]) -> list[float]:
    """The ratio of each round, which saw the machine in one state; rounds where a run failed (None) are left out."""
    pairs = zip(numerators, denominators, strict=True)
    return [over / under for over, under in pairs if over is not None and under is not None]


def number(value: float) -> str:
    """A figure to three digits or more: 0.812, 2.61, 34.2, 3,329."""
    return f"{value:,.{2 if 1 <= value < 10 else 1 if 10 <= value < 100 else 3 if value < 1 else 0}f}"
