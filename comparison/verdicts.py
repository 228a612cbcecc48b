"""From the runs of each variant to its verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from comparison import weights
from comparison.agreement import Bound, Pair, bound, judge, unit_of_rounding, worst
from comparison.causes import causes
from comparison.reading import Loaded
from comparison.result import Verdict
from errors import UsageError

ALONE = (
    "The bounds are of the number format alone and of the losses, growing from step to step; how far the weights are "
    "apart decides nothing: no second run of the reference shows what rounding does to this recipe. compare.py "
    "--strategies makes one."
)
MEASURED = "The bounds are from a second run of the reference, which began with weights that were moved by little."


@dataclass
class Judged:
    """The pairs of one variant's runs with the reference's, by their seed."""

    reference: dict[int, Loaded]
    others: dict[int, Loaded]
    pairs: dict[int, Pair] = field(default_factory=dict)
    normalises: bool = False
    """Whether the network has batch normalisations."""

    @property
    def open_seeds(self) -> set[int]:
        """Those that are not bit-identical: their verdict needs a bound."""
        return {seed for seed, pair in self.pairs.items() if not pair.identical}

    def verdict(self, second: Mapping[int, Pair]) -> Verdict:
        """Over all seeds.

        Args:
            second: by the seed, the reference beside a second run of it.
        """
        verdicts = []
        for seed, allowed in self.bounds(second).items():
            verdicts.append(judge(self.pairs[seed], allowed))
            if not self.pairs[seed].identical:
                verdicts[-1].causes = causes(self.reference[seed], self.others[seed], self.normalises)
        return worst(verdicts)

    def bounds(self, second: Mapping[int, Pair]) -> dict[int, Bound]:
        """What rounding may make of each seed's run; `second` as in `verdict`."""
        found = {}
        for seed, pair in self.pairs.items():
            runs = (self.reference[seed], self.others[seed])
            unit = max(unit_of_rounding(run.metrics["precision"], run.metrics["accelerator"]) for run in runs)
            found[seed] = bound(pair, second.get(seed), unit)
        return found


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
            apart = None if whole is None or theirs is None else weights.difference(whole, theirs)
            size = 0.0 if whole is None else weights.largest(whole)
            each.pairs[seed] = Pair(loaded.run.losses, each.others[seed].run.losses, apart, size)
            each.normalises = any(name.endswith("running_mean") for name in whole or {})
    return made


def _weights(loaded: Loaded, trust: bool) -> weights.Weights | None:
    try:
        return loaded.weights(trust)
    except UsageError:  # of a run that kept none, the losses decide
        return None
