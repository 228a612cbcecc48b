"""A comparison: who takes part in it, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.spread import paired_ratios
from cifar_zero.core.errors import RunError

Figures = Mapping[str, float]
"""What one run measured: some keys of `report.UNITS`, and `timed_images` where it trained."""


@dataclass(frozen=True)
class Ratio:
    """One contender's figures over another's."""

    over: str
    under: str
    figures: tuple[str, ...] = ("images_per_second",)


@dataclass
class Case:
    """A comparison on one footing, and its results.

    Attributes:
        name: what is compared.
        contenders: by name, each a function that makes one run in a fresh process.
        ratios: to be printed.
        figures: of each contender, one for each round; None where the run failed.
        failures: what the last failed run of a contender said.
    """

    name: str
    contenders: Mapping[str, Callable[[], Figures]]
    ratios: Sequence[Ratio] = ()
    figures: dict[str, list[Figures | None]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def values(self, contender: str, figure: str) -> list[float | None]:
        """A figure of each round; None where the run failed or has no such figure."""
        return [None if one is None else one.get(figure) for one in self.figures[contender]]

    def ratio(self, ratio: Ratio, figure: str) -> list[float]:
        """Of each round in which both ran."""
        return paired_ratios(self.values(ratio.over, figure), self.values(ratio.under, figure))

    @property
    def timed_images(self) -> int | None:
        """Images that every run of the comparison trained on while its clock ran; None where nothing was trained.

        Raises RunError where they were not the same for all.
        """
        runs = [one for runs in self.figures.values() for one in runs if one is not None]
        counts = {one["timed_images"] for one in runs if "timed_images" in one}
        if len(counts) > 1:
            raise RunError(f"{self.name}: the runs trained on different numbers of images, {sorted(counts)}")
        return int(counts.pop()) if counts else None
