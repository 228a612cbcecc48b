"""Decides whether two runs trained the same model: bit by bit, within rounding, or not; no torch.

A pair of runs -> their differences -> the bound: what rounding alone may do, measured on a perturbed run of the
reference -> the verdict. docs/comparison.md has the measurements behind the constants.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cifar_zero.comparison.result import Run, Verdict

EPS = {"32": 2.0**-23, "bf16": 2.0**-7, "16": 2.0**-10}
"""Distance from 1 to the next number in float32, bfloat16 and float16 (torch.finfo's eps), by the precision's name."""

TF32_EPS = 2.0**-10
"""The same for TensorFloat-32, in which GPUs by default convolve in a float32 model (torch, CUDA semantics)."""

LEAST_PERTURBATION = 2.0**-17
"""Smallest relative change of a perturbed run's initial weights: 64 eps of float32.

Sometimes rounding decides which of two nearly equal pixels a max-pool takes, and the gradient jumps. A change of one
eps meets such a tie about once in a hundred steps of the tutorial's model, so many runs never meet one; 64 eps meet one
every few steps. In lower precisions one eps is enough."""

FACTOR = 8.0  # a difference may reach this multiple of the perturbed run's drift
FLOOR = 16.0  # smallest difference that counts: this many eps of float32, relative to the loss or the largest weight

SATURATED = 0.1
"""Share of the loss. If rounding may change the loss by more, agreement says nothing about what was computed."""

BROKEN = "weights that are NaN or infinite, or have other names or shapes"


@dataclass
class Apart:
    """The difference of one tensor from the reference's."""

    difference: float  # largest over its elements, absolute; infinite if the tensors cannot be compared
    largest: float  # largest element of the reference, absolute


@dataclass
class Pair:
    """A run and the reference's run of the same seed, compared at the steps that both have."""

    reference: Run
    other: Run
    weights: Mapping[str, Apart] | None  # differences after the last step, by tensor name; None if unknown
    eps: float = EPS["32"]  # eps of the coarser number format of both runs, see `eps_of`
    normalises: bool = False  # whether the model has batch normalisations

    def __post_init__(self) -> None:
        ours, theirs = self.reference.losses.by_step, self.other.losses.by_step
        self.steps = [step for step in ours if step in theirs]
        self.losses = [abs(ours[step]) for step in self.steps]  # of the reference, absolute
        self.differences = [_difference(ours[step], theirs[step]) for step in self.steps]  # see `_difference`

    @property
    def identical(self) -> bool:
        """Whether losses and weights are equal bit by bit."""
        return self.first_difference is None and self.ended is None and not self.weight_difference

    @property
    def needs_bound(self) -> bool:
        """Whether there are steps to judge, and the runs are not identical."""
        return bool(self.steps) and not self.identical

    @property
    def weight_difference(self) -> float | None:
        """The largest difference over all tensors; None if unknown."""
        return None if self.weights is None else max((each.difference for each in self.weights.values()), default=0.0)

    @property
    def first_difference(self) -> int | None:
        return _first(self.steps, [value > 0 for value in self.differences])

    @property
    def ended(self) -> int | None:
        """The step after the last one of the shorter run; None if both ended at the same step."""
        ours, theirs = self.reference.losses.steps[-1:], self.other.losses.steps[-1:]
        return None if ours == theirs else min([*ours, *theirs]) + 1


@dataclass
class Bound:
    """What rounding alone may change in the reference."""

    losses: list[float]  # of each common step; from `undecided` on the largest loss so far, for gross errors
    weights: dict[str, float] | None  # of each tensor at the end; None if weights count only when they are broken
    undecided: int | None = None  # the first step at which rounding may change the loss by more than `SATURATED`


def eps_of(precision: str, accelerator: str, convolves: bool) -> float:
    """Returns the distance from 1 to the next number in the format in which a run computes: of precision 32-true,
    bf16-mixed, bf16-true or 16-mixed, on cpu or gpu; `convolves`: whether its model has convolutions."""
    name = precision.split("-")[0]
    return TF32_EPS if name == "32" and accelerator == "gpu" and convolves else EPS[name]


def bound(pair: Pair, perturbed: Pair | None) -> Bound:
    """Returns what rounding may change in a run; no limit without a `perturbed` run of the same reference."""
    unknown = Bound([math.inf] * len(pair.steps), None)
    found = unknown if perturbed is None else _measured(pair, perturbed)
    allowed = zip(pair.steps, found.losses, pair.losses, strict=True)
    found.undecided = next((step for step, most, loss in allowed if not most <= SATURATED * loss), None)
    if found.undecided is not None:
        judged = pair.steps.index(found.undecided)
        found.losses[judged:] = [*accumulate(pair.losses, max)][judged:]
        found.weights = None
    return found


def judge(pair: Pair, allowed: Bound) -> Verdict:
    """Returns the verdict on a run that has steps in common with the reference."""
    if pair.identical:
        return Verdict("bit-identical", loss_difference=0.0, weight_difference=pair.weight_difference)
    losses = [*zip(pair.differences, allowed.losses, strict=True)]
    parting = _first(pair.steps, [_share(*both) > 1 for both in losses])
    if allowed.undecided is not None and parting is None:
        losses = losses[: pair.steps.index(allowed.undecided)]
    loss, loss_bound = max(losses, key=lambda both: _share(*both), default=(None, None))
    weight, weight_bound = pair.weight_difference, None
    if pair.weights and allowed.weights is not None:
        tensors = [(each.difference, allowed.weights[name]) for name, each in pair.weights.items()]
        weight, weight_bound = max(tensors, key=lambda both: _share(*both))
    broken = weight is not None and not math.isfinite(weight)
    heavy = weight is not None and weight_bound is not None and _share(weight, weight_bound) > 1
    remarks = ["one run ended earlier"] * (pair.ended is not None) + [BROKEN] * broken
    return Verdict(
        "different" if parting or pair.ended or broken or heavy else "within rounding",
        loss_difference=_finite(loss),
        loss_bound=loss_bound,
        weight_difference=_finite(weight),
        weight_bound=weight_bound,
        first_difference=pair.first_difference,
        first_parting=parting or pair.ended,
        remark="; ".join(remarks),
    )


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Returns the worst verdict of several seeds; of the same kind, the one whose loss uses most of its bound."""
    kinds = ("bit-identical", "within rounding", "different")
    return max(verdicts, key=lambda each: (kinds.index(each.kind), _share(each.loss_difference or 0, each.loss_bound)))


def _measured(pair: Pair, perturbed: Pair) -> Bound:
    """Returns a bound that grows with the perturbed run's drift, plus one eps of a coarser format."""
    coarser = pair.eps > perturbed.eps
    floor = pair.eps if coarser else FLOOR * EPS["32"]
    drifts = [0.0, *accumulate(perturbed.differences, max)]
    # A jump may hit one run some steps before another: the perturbed run's drift up to twice the step counts.
    ahead = [drifts[bisect_right(perturbed.steps, 2 * step)] for step in pair.steps]
    losses = [FACTOR * drift + floor * loss for drift, loss in zip(ahead, pair.losses, strict=True)]
    if pair.weights is None or perturbed.weights is None or coarser:
        return Bound(losses, None)
    drift = {name: each.difference for name, each in perturbed.weights.items()}
    tensors = pair.weights.items()
    return Bound(losses, {name: FACTOR * drift.get(name, 0.0) + floor * each.largest for name, each in tensors})


def _share(found: float, most: float | None) -> float:
    """Returns the share of a bound that is used; above 1 it is exceeded."""
    if found == 0:
        return 0.0
    return found / most if most and math.isfinite(found) else math.inf


def _finite(value: float | None) -> float | None:
    """Returns None for infinity and NaN, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def _difference(one: float, other: float) -> float:
    """Returns the absolute difference of two losses; infinite if only one is a number."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    difference = abs(one - other)
    return math.inf if math.isnan(difference) else difference


def _first(steps: Sequence[int], found: Sequence[bool]) -> int | None:
    return next((step for step, yes in zip(steps, found, strict=True) if yes), None)
