"""Compares what a step has computed with two replays of it, one in the training's precision and one in float64.

The rounding error of a value is the norm of the difference between the replays. The training may use other kernels,
which add in another order. So a value of the training may differ from the first replay by ROUNDINGS times the rounding
error, plus LEAST machine epsilons of its norm, because a rounding error may be 0 by chance. If the gradients of the
micro-batches cancel, the sum of their norms takes the place of the norm.

For the same reason, the relative rounding error of some values has a lower limit: of a gradient with fewer than FEW
elements the root mean square over all gradients, and of a loss the root mean square over the losses of all ranks.
"""

import math
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stepcheck.bounds import CANCELLATION
from stepcheck.replay.plain_copy import Computed
from stepcheck.sketch import dense
from stepcheck.verdict import Kind

ROUNDINGS = 3.0
"""Largest allowed error, as a multiple of the step's rounding error."""

LEAST = 4.0
"""Relative error that is allowed in addition, in machine epsilons."""

VISIBLE = 0.5
"""Largest tolerance of a gradient that counts as judged, relative to its norm."""

FEW = 100
"""A tensor with fewer elements has too small a sample of rounding errors."""

CONSTANT = 0.02
"""Largest remainder of a value that counts as explained, for example as a multiple of another value, relative to its
norm."""


@dataclass(frozen=True)
class Compared:
    """A value of a step, with its error and tolerance."""

    kind: Kind
    name: str
    error: float  # relative to the norm; infinite if the value is missing
    tolerance: float  # also relative
    elements: int
    explanation: str = ""
    is_missing: bool = False  # in the training or in the replay

    @property
    def share(self) -> float:
        """Error / tolerance. It is 0 if the tolerance is not finite. It is infinite if the error is NaN, or if the
        tolerance is 0 and the error is not."""
        if not math.isfinite(self.tolerance):
            return 0.0
        if math.isnan(self.error) or not self.tolerance:
            return math.inf if self.error else 0.0
        return self.error / self.tolerance

    def __str__(self) -> str:
        size = "is missing" if self.is_missing else f"is off by {self.error:.2g} of its norm"
        how = f"{size} (tolerance {self.tolerance:.1e}){self.explanation}"
        if self.kind == "output":
            return f"the output of {self.name} {how}"
        return f"the {self.kind.removeprefix('replayed ')} of {self.name}, computed twice by plain PyTorch, {how}"


def identical(actual: Computed, replay: Computed) -> bool:
    """Returns whether a step is bit-identical with a replay, apart from buffers that only one of them has."""
    buffers = actual.buffers.keys() & replay.buffers.keys()
    return (
        _same(actual.losses, replay.losses)
        and actual.gradients.keys() == replay.gradients.keys()
        and _same((actual.gradients[name] for name in replay.gradients), replay.gradients.values())
        and _same((actual.buffers[name] for name in buffers), (replay.buffers[name] for name in buffers))
        and _same((each for _, each in actual.outputs), (each for _, each in replay.outputs))
    )


def compare(
    actual: Computed, low: Computed, exact: Computed, lowest: torch.dtype, rounding: float
) -> Iterator[Compared]:
    """Yields each value of a step, compared with the two replays.

    Args:
        actual: What the training has computed.
        low: The replay in the training's precision.
        exact: The replay in float64.
        lowest: The lowest dtype in which the training computes.
        rounding: Root mean square of the relative rounding errors of the losses of all ranks.
    """
    eps = epsilon(lowest, next(iter(low.gradients.values()), torch.zeros(())).device)
    for (name, value), (_, own), (_, high) in zip(actual.outputs, low.outputs, exact.outputs, strict=True):
        yield _compared("output", name, value, own, high, eps)
    for number, (loss, own, high) in enumerate(zip(actual.losses, low.losses, exact.losses, strict=True), 1):
        own_eps = max(torch.finfo(loss.dtype).eps, eps / 16)
        yield _compared("replayed loss", f"micro-batch {number}", loss, own, high, own_eps, rounding=rounding)
    yield from _gradients(actual, low, exact, eps)
    for name, buffer in low.buffers.items():
        if name in actual.buffers and actual.buffers[name].shape == buffer.shape:
            own_eps = max(eps, torch.finfo(buffer.dtype).eps) if _rounds(buffer) else 0.0
            yield _compared("replayed buffer", name, actual.buffers[name], buffer, exact.buffers[name], own_eps)


def worst(compared: Iterable[Compared]) -> Collection[Compared]:
    """Returns for each kind the first value that exceeds its tolerance, or else the one that is nearest to it."""
    found: dict[Kind, Compared] = {}
    for each in compared:
        last = found.get(each.kind)
        if last is None or (each.share > last.share and last.share <= 1):
            found[each.kind] = each
    return found.values()


def loss_errors(low: Computed, exact: Computed) -> list[float]:
    pairs = zip(low.losses, exact.losses, strict=True)
    return [_distance(own, high) / (_norm(high) + 1e-300) for own, high in pairs]


def _gradients(actual: Computed, low: Computed, exact: Computed, eps: float) -> Iterator[Compared]:
    norms = {name: _norm(each) for name, each in exact.gradients.items()}
    norm_of_all = math.hypot(*norms.values())
    sizes = {name: norm + CANCELLATION * norm_of_all + 1e-300 for name, norm in norms.items()}
    rounding = mean_square(
        _distance(low.gradients[name], exact.gradients[name]) / sizes[name]
        for name in low.gradients.keys() & sizes.keys()
    )
    for name, high in exact.gradients.items():
        if name not in actual.gradients:
            yield Compared("replayed gradient", name, math.inf, 0.0, high.numel(), ": the training computed none", True)
            continue
        if name not in low.gradients:
            continue
        summed = max(1.0, float(exact.summands[name]) / sizes[name])
        value, own = actual.gradients[name], low.gradients[name]
        few = rounding if high.numel() < FEW else 0.0
        result = _compared("replayed gradient", name, value, own, high, eps * summed, sizes[name], few)
        factor = common_factor(_real(value), _real(own)) if result.share > 1 else None
        is_scaled = factor is not None and abs(factor - 1) > CONSTANT
        explanation = f": it is {factor:.3g} times the correct value" if is_scaled else ""
        yield replace(result, explanation=explanation)
    for name in actual.gradients.keys() - (exact.gradients.keys() & low.gradients.keys()):
        size = actual.gradients[name].numel()
        if actual.gradients[name].any():
            yield Compared("replayed gradient", name, math.inf, 0.0, size, ": plain PyTorch computes none", True)


def _compared(
    kind: Kind,
    name: str,
    actual: Tensor,
    low: Tensor,
    exact: Tensor,
    eps: float,
    size: float = 0.0,
    rounding: float = 0.0,
) -> Compared:
    size = size or _norm(exact) + 1e-300
    own = max(_distance(low, exact) / size, rounding)
    tolerance = ROUNDINGS * own + LEAST * eps if _rounds(actual) else 0.0
    if not low.isfinite().all() and not actual.isfinite().all():
        return Compared(kind, name, 0.0, math.inf, actual.numel())
    return Compared(kind, name, _distance(actual, low) / size, tolerance, actual.numel())


def epsilon(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the machine epsilon of a dtype in products on a device. For float32 it is TF32's epsilon, if torch may
    use TF32 on this device."""
    tf32 = dtype == torch.float32 and device.type == "cuda" and _may_use_tf32()
    return 2.0**-10 if tf32 else torch.finfo(dtype).eps  # TF32 has 10 bits after the point


def _may_use_tf32() -> bool:
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")  # read by cuBLAS and cuDNN
    if override in ("0", "1"):
        return override == "1"
    products: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    if not hasattr(products, "fp32_precision"):  # torch 2.8 and older
        return bool(products.allow_tf32 or cudnn.allow_tf32)
    # Reading allow_tf32 raises an error once a script has set fp32_precision (torch 2.15).
    return any(each.fp32_precision == "tf32" for each in (products, cudnn.conv, cudnn.rnn))


def _rounds(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _real(tensor: Tensor) -> Tensor:
    """Returns the numbers of a tensor in float64, two for each complex number."""
    return dense(tensor).double()


def _norm(tensor: Tensor) -> float:
    """Returns the norm of the finite elements, so that a gradient that overflows does not hide the others."""
    return float(_real(tensor).nan_to_num(0.0, 0.0, 0.0).norm())


def _distance(one: Tensor, other: Tensor) -> float:
    """Returns the norm of the difference. Infinite values and NaN count as equal to themselves."""
    one, other = _real(one), _real(other)
    equal = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).masked_fill(equal, 0).norm())


def mean_square(values: Iterable[float]) -> float:
    """Returns the root of the mean of the squares of the finite values, or 0 if there are none."""
    finite = [each for each in values if math.isfinite(each)]
    return math.sqrt(sum(each * each for each in finite) / len(finite)) if finite else 0.0


def common_factor(actual: Tensor, expected: Tensor) -> float | None:
    """Returns the least-squares factor by which `expected` must be multiplied to give `actual`, both float64. Returns
    None if the remainder is larger than CONSTANT times the norm of `actual`."""
    factor = float((actual * expected).sum() / expected.square().sum().clamp(min=1e-300))
    return factor if (actual - factor * expected).norm() <= CONSTANT * actual.norm() else None


def _same(some: object, others: object) -> bool:
    one, two = [*some], [*others]  # pyright: ignore[reportGeneralTypeIssues]
    return len(one) == len(two) and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, two, strict=True))
