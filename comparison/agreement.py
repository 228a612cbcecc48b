"""Whether two runs have trained the same network: bit by bit, as far as rounding lets them, or not; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from comparison.result import Curve, Verdict

UNITS = {"32": 2.0**-23, "bf16": 2.0**-7, "16": 2.0**-10}
"""Distance from 1 to the next number in float32, bfloat16 and float16 (torch.finfo's eps), by the precision's name."""

TF32_UNIT = 2.0**-10
"""Of TensorFloat-32, in which GPUs compute the convolutions of a float32 network unless they are told not to (torch,
notes on CUDA semantics)."""

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


@dataclass
class Pair:
    """A run beside the reference's of the same seed."""

    reference: Curve
    """Loss of each optimizer step."""
    other: Curve
    weight_difference: float | None
    """Largest difference of a weight after the last step; None where it is not known."""
    largest_weight: float
    """Of the reference, absolute."""

    @property
    def identical(self) -> bool:
        """Whether losses and weights are equal bit by bit."""
        return self.first_difference is None and self.weight_difference in (0.0, None)

    @property
    def differences(self) -> list[float]:
        """Of the losses, step by step; infinite where one run has a step that the other has not."""
        steps = self.reference.steps == self.other.steps
        if not steps:
            return [math.inf] * max(len(self.reference.steps), len(self.other.steps))
        return [_difference(*both) for both in zip(self.reference.values, self.other.values, strict=True)]

    @property
    def first_difference(self) -> int | None:
        """The first step whose losses are not equal."""
        return _first(self.reference.steps or self.other.steps, (value > 0 for value in self.differences))


@dataclass
class Bound:
    """What rounding may make of the reference."""

    losses: list[float]
    """For each optimizer step."""
    weights: float | None
    """After the last one; None where nothing is known of them, and the losses decide."""


def unit_of_rounding(precision: str, accelerator: str) -> float:
    """The relative distance of two neighbouring numbers of the format that a run computes in.

    Args:
        precision: of the run, settled: 32-true, bf16-mixed, bf16-true or 16-mixed.
        accelerator: cpu or gpu.
    """
    name = precision.split("-")[0]
    return TF32_UNIT if name == "32" and accelerator == "gpu" else UNITS[name]


def bound(pair: Pair, second: Pair | None, unit: float) -> Bound:
    """What rounding may make of the losses and weights of a run.

    Args:
        pair: that is judged.
        second: a second run of the reference, beside the first, which rounding alone has moved; None without one.
        unit: see `unit_of_rounding`.
    """
    losses = [abs(loss) for loss in pair.reference.values]
    if second is None or second.identical or second.reference.steps != second.other.steps:
        grown = [max(GROWTH * UNITS["32"] * number, unit) * loss for number, loss in enumerate(losses, start=1)]
        return Bound(grown, None)
    drifts = [*accumulate(second.differences, max)]
    # A jump may befall one run some steps before another: what the second run has met after twice the steps counts.
    ahead = [drifts[min(2 * index + 1, len(drifts) - 1)] for index in range(len(losses))]
    floor = FLOOR * UNITS["32"]
    bounds = [FACTOR * drift + floor * loss for drift, loss in zip(ahead, losses, strict=True)]
    return Bound(bounds, FACTOR * (second.weight_difference or 0.0) + floor * pair.largest_weight)


def judge(pair: Pair, allowed: Bound) -> Verdict:
    """The verdict on one run."""
    if pair.identical:
        return Verdict("bit-identical", loss_difference=0.0, weight_difference=pair.weight_difference)
    differences = pair.differences
    over = [not value <= most for value, most in zip(differences, allowed.losses, strict=False)]
    parting = _first(pair.reference.steps or pair.other.steps, over)
    if len(differences) > len(allowed.losses) and parting is None:
        parting = pair.first_difference
    weights = pair.weight_difference
    agree = parting is None and (weights is None or allowed.weights is None or weights <= allowed.weights)
    known = len(allowed.losses) == len(differences)
    largest = max(range(len(differences)), key=differences.__getitem__, default=None) if known else None
    return Verdict(
        "within rounding" if agree else "different",
        loss_difference=None if largest is None else _finite(differences[largest]),
        loss_bound=None if largest is None else allowed.losses[largest],
        weight_difference=_finite(weights),
        weight_bound=None if weights is None else allowed.weights,
        first_difference=pair.first_difference,
        first_parting=parting,
    )


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Of several seeds: the kind that is worse, and of the same kind the one with more of its bound used up."""
    order = ("reference", "bit-identical", "within rounding", "different", "not trained")
    return max(verdicts, key=lambda verdict: (order.index(verdict.kind), _used(verdict)))


def _used(verdict: Verdict) -> float:
    pairs = ((verdict.loss_difference, verdict.loss_bound), (verdict.weight_difference, verdict.weight_bound))
    return max((found / most for found, most in pairs if found and most), default=0.0)


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
