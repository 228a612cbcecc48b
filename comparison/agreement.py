"""Whether two runs have trained the same network: bit by bit, as far as rounding lets them, or not; no torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from comparison.result import Curve, Verdict

UNITS = {"32": 2.0**-23, "bf16": 2.0**-7, "16": 2.0**-10}
"""Distance from 1 to the next number in float32, bfloat16 and float16 (torch.finfo's eps), by the precision's name."""

TF32_UNIT = 2.0**-10
"""Of TensorFloat-32, in which GPUs compute the convolutions of a float32 network, and nothing else of it, unless they
are told otherwise (torch, notes on CUDA semantics)."""

LEAST_MOVE = 2.0**-17
"""Relative distance by which a second run's weights are moved at least: 64 units of float32.

Rounding does not only shift: now and then it decides which of two nearly equal pixels a max-pool takes, or on which
side of 0 a ReLU stands, and the gradient jumps. One unit of float32 meets such a tie about once in a hundred steps of
the tutorial's network, and so it befalls one run and spares another; 64 units meet one in every few steps. In the lower
precisions one unit is enough for it."""

FACTOR = 8.0
"""Times the drift of the second run of the reference; docs/comparison.md has the measurements that it is from."""

FLOOR = 16.0
"""Units of float32 of a loss, or of the largest weight, below which nothing is a difference: both are in float32."""

GROWTH = 100.0
"""Units of float32 of the loss for each step so far, where there is no second run: the tutorial's network has parted by
up to 50. One unit of a lower precision counts from the first step on."""

SATURATED = 0.1
"""Share of the loss: where rounding may move it by more, agreement says nothing any more of what was computed."""

BROKEN = "weights that are no numbers, or of other names or shapes"


@dataclass
class Apart:
    """How far a tensor of the weights is from the reference's, after the last step."""

    difference: float
    """The largest of an element; infinite where there is none to take."""
    largest: float
    """Element of the reference, absolute."""


@dataclass
class Pair:
    """A run beside the reference's of the same seed, compared at the steps that both have."""

    reference: Curve
    """Loss of each optimizer step."""
    other: Curve
    weights: Mapping[str, Apart] | None
    """By the tensor's name; None where they are not known."""
    steps: list[int] = field(init=False)
    """Those that both have."""
    losses: list[float] = field(init=False)
    """The reference's at these steps, absolute."""
    differences: list[float] = field(init=False)
    """Of the losses at these steps; infinite where one alone is no number."""

    def __post_init__(self) -> None:
        theirs = dict(zip(self.other.steps, self.other.values, strict=True))
        ours = dict(zip(self.reference.steps, self.reference.values, strict=True))
        self.steps = [step for step in ours if step in theirs]
        self.losses = [abs(ours[step]) for step in self.steps]
        self.differences = [_difference(ours[step], theirs[step]) for step in self.steps]

    @property
    def identical(self) -> bool:
        """Whether losses and weights are equal bit by bit."""
        return self.first_difference is None and self.ended is None and self.weight_difference in (0.0, None)

    @property
    def weight_difference(self) -> float | None:
        """The largest of all tensors; None where it is not known."""
        return None if self.weights is None else max((each.difference for each in self.weights.values()), default=0.0)

    @property
    def first_difference(self) -> int | None:
        """The first step whose losses are not equal."""
        return _first(self.steps, (value > 0 for value in self.differences))

    @property
    def ended(self) -> int | None:
        """The step after the last of the shorter run; None where both ended at the same."""
        ours, theirs = self.reference.steps[-1:], self.other.steps[-1:]
        return None if ours == theirs else min([*ours, *theirs]) + 1


@dataclass
class Bound:
    """What rounding may make of the reference."""

    losses: list[float]
    """For each common step; from `undecided` on the largest loss so far, which only gross faults exceed."""
    weights: dict[str, float] | None
    """For each tensor after the last step; None where they decide nothing unless they are broken."""
    undecided: int | None = None
    """The first step at which rounding may move the loss by more than a tenth."""


def unit_of_rounding(precision: str, accelerator: str, convolves: bool) -> float:
    """The relative distance of two neighbouring numbers of the format that a run computes in.

    Args:
        precision: of the run, settled: 32-true, bf16-mixed, bf16-true or 16-mixed.
        accelerator: cpu or gpu.
        convolves: whether the network has convolutions.
    """
    name = precision.split("-")[0]
    return TF32_UNIT if name == "32" and accelerator == "gpu" and convolves else UNITS[name]


def bound(pair: Pair, second: Pair | None, unit: float) -> Bound:
    """What rounding may make of the losses and weights of a run.

    Args:
        pair: that is judged.
        second: a second run of the reference, beside the first, which rounding alone has moved; None without one.
        unit: see `unit_of_rounding`.
    """
    usable = second is not None and second.steps and not second.identical
    losses, weights = _of_second(pair, second) if second is not None and usable else _of_format(pair, unit)
    allowed = zip(pair.steps, losses, pair.losses, strict=True)
    undecided = next((step for step, most, loss in allowed if not most <= SATURATED * loss), None)
    if undecided is None:
        return Bound(losses, weights)
    judged = pair.steps.index(undecided)
    return Bound([*losses[:judged], *[*accumulate(pair.losses, max)][judged:]], None, undecided)


def judge(pair: Pair, allowed: Bound) -> Verdict:
    """The verdict on one run that has steps in common with the reference."""
    if pair.identical:
        return Verdict("bit-identical", loss_difference=0.0, weight_difference=pair.weight_difference)
    over = [
        not math.isfinite(found) or found > most for found, most in zip(pair.differences, allowed.losses, strict=True)
    ]
    parting = _first(pair.steps, over)
    judged = [*zip(pair.differences, allowed.losses, strict=True)]
    if allowed.undecided is not None and parting is None:
        judged = judged[: pair.steps.index(allowed.undecided)]
    loss, loss_bound = max(judged, key=lambda both: _share(*both), default=(None, None))
    weight, weight_bound = _worst_tensor(pair, allowed)
    broken = weight is not None and not math.isfinite(weight)
    heavy = weight is not None and weight_bound is not None and weight > weight_bound
    return Verdict(
        "different" if parting or pair.ended or broken or heavy else "within rounding",
        loss_difference=_finite(loss),
        loss_bound=loss_bound,
        weight_difference=_finite(weight),
        weight_bound=weight_bound,
        first_difference=pair.first_difference,
        first_parting=parting or pair.ended,
        remark="; ".join(_remarks(pair, broken)),
    )


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Of several seeds: the kind that is worse, and of the same kind the one with more of its bound used up."""
    order = ("reference", "bit-identical", "within rounding", "different", "not trained")
    return max(verdicts, key=lambda verdict: (order.index(verdict.kind), _used(verdict)))


def _of_second(pair: Pair, second: Pair) -> tuple[list[float], dict[str, float] | None]:
    drifts = [0.0, *accumulate(second.differences, max)]
    # A jump may befall one run some steps before another: what the second run has met after twice the steps counts.
    ahead = [drifts[bisect_right(second.steps, 2 * step)] for step in pair.steps]
    floor = FLOOR * UNITS["32"]
    losses = [FACTOR * drift + floor * loss for drift, loss in zip(ahead, pair.losses, strict=True)]
    if pair.weights is None or second.weights is None:
        return losses, None
    drift = {name: each.difference for name, each in second.weights.items()}
    weights = {name: FACTOR * drift.get(name, 0.0) + floor * each.largest for name, each in pair.weights.items()}
    return losses, weights


def _of_format(pair: Pair, unit: float) -> tuple[list[float], dict[str, float] | None]:
    """Without a second run; the weights decide only where all losses are equal, and so but the last step can have
    moved them."""
    losses = [max(GROWTH * UNITS["32"] * step, unit) * loss for step, loss in zip(pair.steps, pair.losses, strict=True)]
    if pair.weights is None or pair.first_difference is not None:
        return losses, None
    share = max(GROWTH * UNITS["32"], unit)
    return losses, {name: share * each.largest for name, each in pair.weights.items()}


def _worst_tensor(pair: Pair, allowed: Bound) -> tuple[float | None, float | None]:
    """Difference and bound of the tensor that uses most of its bound up; the bound is None where there is none."""
    if pair.weights is None or allowed.weights is None:
        return pair.weight_difference, None
    found = [(each.difference, allowed.weights[name]) for name, each in pair.weights.items()]
    return max(found, key=lambda both: _share(*both), default=(0.0, None))


def _remarks(pair: Pair, broken: bool) -> Iterator[str]:
    if pair.ended is not None:
        yield f"ran {pair.other.steps[-1]:,} steps, the reference {pair.reference.steps[-1]:,}"
    if broken:
        yield BROKEN


def _used(verdict: Verdict) -> float:
    pairs = ((verdict.loss_difference, verdict.loss_bound), (verdict.weight_difference, verdict.weight_bound))
    return max((_share(found, most) for found, most in pairs if found and most is not None), default=0.0)


def _share(found: float, most: float) -> float:
    """Of a bound that is used up."""
    if not found or not most:
        return math.inf if found else 0.0
    return found / most if math.isfinite(found) else math.inf


def _finite(value: float | None) -> float | None:
    """JSON knows no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _difference(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    difference = abs(one - other)
    return math.inf if math.isnan(difference) else difference


def _first(steps: list[int], found: Iterable[bool]) -> int | None:
    return next((step for step, yes in zip(steps, found, strict=False) if yes), None)
