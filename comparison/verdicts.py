"""From the runs of each variant to its verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from comparison import weights
from comparison.agreement import Bound, Pair, bound, judge, unit_of_rounding, worst
from comparison.causes import causes
from comparison.reading import Loaded
from comparison.result import Verdict
from errors import UsageError

Source = Literal["second run", "format", "coarser format"]

SOURCES: dict[Source, str] = {
    "second run": (
        "The bounds are from a second run of the reference, which began with weights that were moved by little."
    ),
    "format": (
        "The bounds are of the number format alone and of the losses, growing from step to step; how far the weights "
        "are apart decides nothing unless all losses are equal: no second run of the reference shows what rounding "
        "does to this recipe. compare.py --strategies makes one."
    ),
    "coarser format": (
        "The bounds are of the coarser number format alone: the second run of the reference shows what rounding does "
        "in a finer one."
    ),
}
"""Where the bounds of a verdict come from, in a note."""


@dataclass
class Drift:
    """A second run of the reference, beside the first."""

    run: Loaded
    pair: Pair
    unit: float
    """Of rounding, in both."""


@dataclass
class Judged:
    """The pairs of one variant's runs with the reference's, by their seed."""

    reference: dict[int, Loaded]
    others: dict[int, Loaded]
    pairs: dict[int, Pair] = field(default_factory=dict)
    normalises: bool = False
    """Whether the network has batch normalisations."""
    convolves: bool = True
    """Whether it has convolutions, as far as that is known."""
    notes: list[str] = field(default_factory=list)
    """On weights that could not be compared, a sentence each."""

    @property
    def open_seeds(self) -> set[int]:
        """Those that are not bit-identical: their verdict needs a bound."""
        return {seed for seed, pair in self.pairs.items() if pair.steps and not pair.identical}

    def verdict(self, drifts: Mapping[int, Sequence[Drift]]) -> Verdict | str:
        """Over all seeds, or why there can be none."""
        if not all(pair.steps for pair in self.pairs.values()):
            return "no optimizer step that the reference has too"
        verdicts, blind = [], False
        for seed, (allowed, _) in self.bounds(drifts).items():
            pair = self.pairs[seed]
            verdicts.append(judge(pair, allowed))
            if not pair.identical:
                verdicts[-1].causes = causes(self.reference[seed], self.others[seed], self.normalises)
                blind = blind or allowed.undecided == pair.steps[0]
        found = worst(verdicts)
        if blind and found.kind != "different":
            return "rounding alone moves the losses by more than a tenth, from the first step on"
        return found

    def bounds(self, drifts: Mapping[int, Sequence[Drift]]) -> dict[int, tuple[Bound, Source]]:
        """What rounding may make of each seed's run, and where that is from: no run is its own second one."""
        found: dict[int, tuple[Bound, Source]] = {}
        for seed, pair in self.pairs.items():
            unit = self.unit(seed)
            second = next((drift for drift in drifts.get(seed, ()) if drift.run is not self.others[seed]), None)
            if second is None:
                found[seed] = bound(pair, None, unit), "format"
            elif unit > second.unit:
                found[seed] = bound(pair, None, unit), "coarser format"
            else:
                found[seed] = bound(pair, second.pair, unit), "second run"
        return found

    def unit(self, seed: int) -> float:
        """Of rounding, in the coarser of both runs."""
        runs = (self.reference[seed], self.others[seed])
        units = [unit_of_rounding(run.metrics["precision"], run.metrics["accelerator"], self.convolves) for run in runs]
        return max(units)


def judged(reference: Iterable[Loaded], others: Iterable[Iterable[Loaded]], trust: bool = False) -> list[Judged]:
    """Compares runs with the reference's of the same seed, losses and weights; a weight is read once.

    Args:
        reference: its runs, one for each seed.
        others: the same of each other variant; runs of seeds that the reference has not are left out.
        trust: whether a checkpoint may be loaded that could run code.
    """
    by_seed = {loaded.run.seed: loaded for loaded in reference}
    made = [Judged(by_seed, {run.run.seed: run for run in runs if run.run.seed in by_seed}) for runs in others]
    for seed, loaded in by_seed.items():
        whole = _weights(loaded, trust)
        for each in made:
            if seed not in each.others:
                continue
            theirs = _weights(each.others[seed], trust)
            each.notes += [read for read in (whole, theirs) if isinstance(read, str)]
            apart = None if isinstance(whole, str) or isinstance(theirs, str) else weights.apart(whole, theirs)
            each.pairs[seed] = Pair(loaded.run.losses, each.others[seed].run.losses, apart)
            if not isinstance(whole, str):
                each.normalises = any(name.endswith("running_mean") for name in whole)
                each.convolves = weights.convolves(whole)
    return made


def drifts_of(reference: Sequence[Loaded], again: Sequence[Loaded], trust: bool) -> dict[int, list[Drift]]:
    """What rounding made of second runs of the reference, by the seed; those that it left as they were show nothing."""
    found: dict[int, list[Drift]] = {}
    for run, each in zip(again, judged(reference, [[run] for run in again], trust), strict=True):
        for seed in each.open_seeds:
            unit = each.unit(seed) if run.rounding is None else run.rounding
            found.setdefault(seed, []).append(Drift(run, each.pairs[seed], unit))
    return found


def _weights(loaded: Loaded, trust: bool) -> weights.Weights | str:
    """A note where they cannot be read: then the losses decide."""
    try:
        return loaded.weights(trust)
    except UsageError as error:
        return f"The weights of {loaded.folder} were not compared: {error}."
