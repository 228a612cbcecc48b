"""Judges a recorded training against its reference's: the first step and tensor that rounding does not explain.

What a step computes is judged in the order in which one value follows from the others: loss, gradients, learning rates,
updates of the weights. The bound of each value comes from perturbed trainings of the reference, as TTrace does for
Megatron (arXiv 2506.09280): a tensor that rounding moves far may differ more than one that it does not move.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cifar_zero.comparison.agreement import EPS, FACTOR, FLOOR
from cifar_zero.comparison.recorded.record import Record, Tensors
from cifar_zero.comparison.result import fall_of, has_fallen

SATURATED = 0.5  # share of a value. If rounding may change it by more, it is not judged

CONSTANT = 0.05
"""Deviation from a common ratio, as a share of it, up to which gradients are the reference's times a number."""

UNCERTAIN = 0.1
"""Share of an element of the gradient. Adam divides a gradient by its own size, so that an element near 0 moves its
weight as far as any other, in a direction that rounding decides: where the two gradients have differed by more than
this share, the update of the element is not judged."""

LEARNS = 0.5  # least share of the reference's fall of the loss by which a training's loss must fall


@dataclass(frozen=True)
class Value:
    """One value of a training, and its difference from the reference's."""

    name: str  # loss, learning rate, or: gradient of, update of, initial NAME
    difference: float  # Euclidean norm; infinite if the values cannot be compared
    size: float  # norm of the reference's value; of a tensor, plus a thousandth of the norm of all tensors
    slack: float = 0.0  # absolute; of an update what its weight's format rounds and its gradient's difference causes


@dataclass
class Finding:
    """The first value beyond rounding."""

    step: int  # optimizer step, from 1
    value: Value
    bound: float
    others: int  # further tensors of the same step and kind that are beyond rounding
    pattern: str = ""  # what the gradients of all tensors have in common; empty if nothing

    def __str__(self) -> str:
        others = f" and {self.others} more" if self.others else ""
        if not math.isfinite(self.value.difference):
            return f"step {self.step}: {self.value.name}{others}: missing, NaN or infinite, or of another shape"
        found, allowed = (_percent(part / self.value.size) for part in (self.value.difference, self.bound))
        text = f"step {self.step}: {self.value.name}{others} off by {found} where rounding allows {allowed}"
        return f"{text}; {self.pattern}" if self.pattern else text


def first_difference(ours: Record, reference: Record) -> int | None:
    """Returns the first step, from 1, in which a recorded number is not the same; None if all are."""
    steps = enumerate(compared(ours, reference), 1)
    return next((step for step, values in steps if any(value.difference for value in values)), None)


def first_infinite(reference: Record, precision: str) -> int | None:
    """Returns the first step, from 1, whose loss or gradient is NaN or infinite, so that it cannot be judged; None if
    none is. In 16-mixed gradients do not count, because the loss scaler skips those that overflow."""
    infinite = [not math.isfinite(loss) for loss in reference.losses]
    for at, tensors in enumerate(reference.gradients if precision != "16-mixed" else ()):
        infinite[at] |= not math.isfinite(norm(tensors))
    return infinite.index(True) + 1 if True in infinite else None


def first_fault(ours: Record, reference: Record, drifted: Sequence[Record], precision: str) -> Finding | None:
    """Returns the first value that differs by more than rounding may cause; None if there is none. `drifted` is the
    reference with perturbed initial weights, and perhaps repeated; `precision` is 32-true, bf16-mixed or 16-mixed."""
    eps = EPS[precision.split("-")[0]]
    # One eps of a low precision is what two different but right ways to compute a value differ by.
    floor = FLOOR * eps if precision == "32-true" else 2 * eps
    drifts: dict[str, float] = {}
    last, measured = len(reference.losses), 0
    drifting = [compared(other, reference) for other in drifted]
    for step, values in enumerate(compared(ours, reference), 1):
        # A jump may hit one run some steps before another: the drift up to twice the step counts, as in agreement.py.
        while measured < min(2 * step, last):
            measured += 1
            for value in (value for each in drifting for value in next(each)):
                if not value.name.startswith("initial"):  # these are what was perturbed
                    drifts[value.name] = max(drifts.get(value.name, 0.0), value.difference / (value.size or 1))
        bounds = {name: (FACTOR * drift + floor) for name, drift in drifts.items()}
        beyond = []
        for value in values:
            bound = bounds.get(value.name, floor)
            most = bound * value.size + value.slack
            if value.difference > most and (bound < SATURATED or not math.isfinite(value.difference)):
                beyond.append((value, most))
        if beyond:
            kind = beyond[0][0].name.split()[0]
            same = [each for each in beyond if each[0].name.split()[0] == kind]
            worst, bound = max(same, key=lambda each: each[0].difference / each[0].size if each[0].size else math.inf)
            gradients = (record.gradients[step - 1] for record in (ours, reference))
            pattern = gradient_pattern(*gradients) if kind == "gradient" else ""
            return Finding(step, worst, bound, len(same) - 1, pattern)
    return None


def compared(ours: Record, reference: Record) -> Iterator[list[Value]]:
    """Yields the values of each step with their differences from the reference's, causes before their effects."""
    shares: dict[str, Tensor | None] = {}  # the largest by which each element of a gradient has differed so far
    moves: dict[str, Tensor] = {}  # the farthest that the reference has moved each element of a weight so far
    for at in range(max(len(ours.losses), len(reference.losses))):
        if at >= min(len(ours.losses), len(reference.losses)):
            yield [Value("loss: one of the trainings has fewer steps", math.inf, 1.0)]
            continue
        recorded = at < len(reference.gradients)
        values = [] if at else [*_tensors("initial", ours.weights[0], reference.weights[0], {})]
        values.append(_scalar("loss", ours.losses[at], reference.losses[at]))
        if recorded:
            values += _tensors("gradient of", ours.gradients[at], reference.gradients[at], {})
        rates = [sorted(record.rates[at]) for record in (ours, reference)]
        if len(rates[0]) != len(rates[1]):
            values.append(Value("learning rate: another number of parameter groups", math.inf, 1.0))
        values += [_scalar("learning rate", one, other) for one, other in zip(*rates, strict=False)]
        if recorded:
            updates, theirs, slack = _update(ours, at), _update(reference, at), {}
            for name, weight in ours.weights[at].items():
                slack[name] = 2 * torch.finfo(weight.dtype).eps * float(weight.double().norm())
                share = _share(ours.gradients[at].get(name), reference.gradients[at].get(name))
                before = shares.get(name, share)
                shares[name] = share = None if share is None or before is None else torch.maximum(share, before)
                if share is None:
                    continue
                certain = share <= UNCERTAIN
                updates[name] = updates[name].where(certain, theirs[name])
                # Momentum carries a difference on, and may cancel a gradient, whose update is then small.
                moved = theirs[name].abs()
                moves[name] = torch.maximum(moved, moves.get(name, moved))
                slack[name] += FACTOR * float((moves[name] * share).where(certain, 0.0).norm())
            values += _tensors("update of", updates, theirs, slack)
        yield values


def _share(mine: Tensor | None, its: Tensor | None) -> Tensor | None:
    """Returns the share by which each element of a gradient differs, 0 of 0 is 0; None where one is missing."""
    if mine is None or its is None or mine.shape != its.shape:
        return None
    return ((mine - its).abs() / its.abs()).nan_to_num(posinf=math.inf)


def gradient_pattern(ours: Tensors, reference: Tensors) -> str:
    """Returns what the gradients of a step have in common: a constant ratio to the reference's, or none."""
    ratios = []
    least = 1e-3 * norm(reference)
    for name in reference.keys() & ours.keys():
        theirs = reference[name].flatten().double()
        size = float(theirs.norm())
        if size > least:
            mine = ours[name].flatten().double()
            ratio = float(mine @ theirs) / size**2
            ratios.append((ratio, float((mine - ratio * theirs).norm()) / size))
    if not ratios:
        return ""
    middle = statistics.median(ratio for ratio, _ in ratios)
    constant = [rest for ratio, rest in ratios if abs(ratio - middle) <= CONSTANT * abs(middle) and rest <= CONSTANT]
    if abs(middle - 1) > CONSTANT and len(constant) > len(ratios) / 2:
        return (
            f"the gradients of {len(constant)} of {len(ratios)} tensors are {middle:.3g} of the reference's: "
            "micro-batches are lost, or scaled twice"
        )
    if not constant:
        low, high = min(ratios)[0], max(ratios)[0]
        return f"no common factor ({low:.2g} to {high:.2g}): gradients of some micro-batches or ranks are missing"
    return ""


def learned(ours: Record, reference: Record) -> str:
    """Returns why a training has not learned; empty if its loss has fallen as the reference's."""
    fall, theirs = fall_of(ours.losses), fall_of(reference.losses)
    if not has_fallen(reference.losses):
        return "the reference's loss did not fall: agreement says nothing"
    if not fall >= LEARNS * theirs:
        return f"the loss fell by {fall:.3f}, the reference's by {theirs:.3f}"
    return ""


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Returns the Euclidean norm over all elements."""
    return math.sqrt(sum(float(tensor.double().norm()) ** 2 for tensor in tensors.values()))


def _scalar(name: str, one: float, other: float) -> Value:
    return Value(name, abs(one - other) if math.isfinite(one) else math.inf, abs(other))


def _update(record: Record, at: int) -> Tensors:
    """Returns by how much a step has moved the weights; not their values, in which a wrong step would not show."""
    before, after = record.weights[at], record.weights[at + 1]
    return {name: after[name].double() - before[name].double() for name in before}


def _tensors(kind: str, ours: Tensors, reference: Tensors, slack: Mapping[str, float]) -> Iterator[Value]:
    """Yields the difference of each tensor; `slack`: see `Value`."""
    # A tensor that is NaN in the reference cannot be judged; the others can.
    whole = 1e-3 * norm({name: tensor for name, tensor in reference.items() if tensor.isfinite().all()})
    for name in dict.fromkeys([*reference, *ours]):
        one, other = ours.get(name), reference.get(name)
        if one is None or other is None or one.shape != other.shape:
            yield Value(f"{kind} {name}", math.inf, 1.0)
            continue
        difference = float((one.double() - other.double()).norm())
        difference = difference if math.isfinite(difference) else math.inf
        yield Value(f"{kind} {name}", difference, float(other.double().norm()) + whole, slack.get(name, 0.0))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
