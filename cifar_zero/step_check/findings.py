"""Compares the values of a step with the values of two replays, one in the training's precision and one in float64, and
collects the findings. Also defines the bounds."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from cifar_zero.step_check.replay import Replay
from cifar_zero.step_check.verdict import Finding, Kind, Verdict

ROUNDINGS = 3.0
"""Largest allowed error of a value, as a multiple of the step's rounding error. An error is allowed at all because the
strategy sums in another order than the replay. In the cases of `cifar-zero compare --acceptance`, correct engines use
up to a fifth of the bound (two CPU ranks, DeepSpeed 0.19.8, torch 2.15)."""

LEAST = 4.0
"""Relative error that is allowed in addition, in machine epsilons of the dtype in which the strategy computes. Two
correct sums may differ by that much even if the measured rounding error is 0. If the summands cancel, the error is
relative to their norm."""

SMALL = 1e-3
"""Share of the whole gradient's norm that is added to the norm of one tensor's gradient before the error of this
gradient is divided by it. Without this addition, the bound would be too tight for a gradient whose summands nearly
cancel, because it still has the rounding error of the summands."""

CONSTANT = 0.02
"""A gradient counts as a constant multiple of another gradient if the norm of the remainder is smaller than this share
of the gradient's norm."""

Explain = Callable[[str, Tensor, Tensor], str]
"""A function that takes a tensor's name, the tensor and the correct tensor, and returns a text that says what is wrong
with the tensor."""


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """Returns the L2 norm of all tensors together, as if they were one vector."""
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors.values()))


def off_by(found: Tensor, wanted: Tensor) -> float:
    """Returns the norm of the difference of two tensors, divided by the norm of `wanted`, or 0 if they are equal bit by
    bit."""
    distance = _distance(found, wanted)
    return distance and distance / max(float(wanted.double().norm()), 1e-30)


def _distance(one: Tensor, other: Tensor) -> float:
    """Returns the norm of the difference of two tensors. Infinite values and NaN count as equal to themselves."""
    if torch.equal(one, other):
        return 0.0
    are_equal = (one == other) | (one.isnan() & other.isnan())
    return float((one.double() - other.double()).masked_fill(are_equal, 0).norm())


def constant_factor(found: Tensor, wanted: Tensor) -> float | None:
    """Returns the factor for which `found` is `factor * wanted` up to the share CONSTANT, or None if there is no such
    factor."""
    factor = float((found * wanted).sum() / wanted.square().sum().clamp(min=1e-300))
    rest = float((found - factor * wanted).norm()) / max(float(found.norm()), 1e-300)
    return factor if rest < CONSTANT else None


def explain_factor(name: str, found: Tensor, wanted: Tensor) -> str:
    """Returns a text with the constant factor by which the gradient `found` differs from `wanted`. The text is empty if
    there is no such factor, or if the factor cannot be told from 1."""
    factor = constant_factor(found, wanted)
    if factor is None or abs(factor - 1) < CONSTANT:
        return ""
    return f"it is {factor:.3g} times the correct value"


class Findings:
    """Collects the findings of this rank in one step."""

    def __init__(self, step: int, verdict: Verdict):
        """Begins an empty collection.

        Args:
            step: The optimizer step, from 1.
            verdict: The verdict that receives notes on what is not checked.
        """
        self.step, self.verdict, self.all = step, verdict, list[Finding]()

    def add(
        self,
        kind: Kind,
        name: str,
        off: float,
        allowed: float,
        elements: int = 1,
        pattern: str = "",
        own_share: float = 1.0,
    ) -> None:
        """Adds a finding. The arguments are fields of `Finding`."""
        self.all.append(Finding(self.step, kind, name, off, allowed, elements, pattern, own_share))

    def compare(
        self,
        kind: Kind,
        name: str,
        found: Tensor,
        low: Tensor,
        exact: Tensor,
        dtype: torch.dtype,
        added: float = 0.0,
        summed: float = 0.0,
        explain: Explain | None = None,
    ) -> None:
        """Compares a tensor with its value in the replay `low`, and adds the finding. The difference between `low` and
        `exact` is the rounding error of the step, from which the bound of the error is computed. If both the tensor and
        `low` contain infinite values or NaN, the tensor is not judged, and the verdict gets a note.

        Args:
            kind: The kind of the finding.
            name: The tensor's name in the plain model.
            found: The tensor to check.
            low: The tensor in the replay in the training's precision.
            exact: The tensor in the replay in float64.
            dtype: The dtype in which the strategy computes the tensor. The bound of an integer tensor is 0.
            added: A number that is added to the norm by which errors are divided.
            summed: The norm of what was added up to the tensor, if it is larger than the tensor's own norm.
            explain: Called if the error exceeds the bound, to explain the fault in the finding.
        """
        if not low.isfinite().all() and not found.isfinite().all():
            self.verdict.note(f"parts of step {self.step}, because plain PyTorch computes NaN or infinite values too")
            self.add(kind, name, 0.0, math.inf, found.numel())
            return
        size = max(float(exact.double().norm()) + added, 1e-300)
        off, allowed = _distance(found, low) / size, 0.0
        if dtype.is_floating_point:
            allowed = ROUNDINGS * _distance(low, exact) / size + LEAST * torch.finfo(dtype).eps * max(
                1.0, summed / size
            )
        pattern = explain(name, found, low) if explain and off > allowed else ""
        own = max(float(low.double().norm()), float(exact.double().norm()))
        self.add(kind, name, off, allowed, found.numel(), pattern, own / size)

    def compare_losses(
        self,
        found: Iterable[Tensor],
        low: Tensor,
        exact: Tensor,
        dtype: torch.dtype,
        kind: Kind = "loss",
        explain: Explain | None = None,
    ) -> None:
        """Compares the loss of each micro-batch with its values in the two replays; see `compare`. The losses of the
        replays have the shape (micro-batches,)."""
        for number, values in enumerate(zip(found, low, exact, strict=True), 1):
            self.compare(kind, f"micro-batch {number}", *values, dtype, explain=explain)

    def compare_gradients(
        self,
        found: Mapping[str, Tensor],
        low: Replay,
        exact: Replay,
        dtypes: Mapping[str, torch.dtype],
        kind: Kind = "gradient",
        explain: Explain = explain_factor,
    ) -> None:
        """Compares each gradient with the gradient of the same name in the two replays; see `compare`. A missing
        gradient is a fault. `dtypes` maps the name of each weight to the dtype in which the strategy computes with
        it.

        If the gradients of micro-batches or ranks cancel, the rounding error of their sum is large in relation to the
        sum. It may nevertheless be 0 in the replay, by chance.
        """
        whole = norm_of(exact.gradients)
        for name, wanted in exact.gradients.items():
            if name in found:
                sizes = SMALL * whole, float(exact.summed[name])
                self.compare(kind, name, found[name], low.gradients[name], wanted, dtypes[name], *sizes, explain)
            else:
                self.add(kind, name, math.inf, 0.0, wanted.numel(), "it is missing")

    def compare_buffers(
        self,
        found: Mapping[str, Tensor],
        low: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
        kind: Kind = "buffer",
    ) -> None:
        """Compares each buffer with the buffer of the same name in the two replays; see `compare`. Adds a note to the
        verdict for a buffer that the replays do not have."""
        for name, buffer in found.items():
            if name in low and low[name].shape == buffer.shape:
                self.compare(kind, name, buffer.cpu(), low[name], exact[name], buffer.dtype)
            else:
                self.verdict.note(f"the buffer {name}, because the copy has no such buffer")
