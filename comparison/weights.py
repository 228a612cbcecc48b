"""How far the weights of two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from comparison.agreement import Apart

Weights = Mapping[str, Tensor]
"""By their names in the plain network."""


def apart(reference: Weights, other: Weights) -> dict[str, Apart]:
    """For each tensor the largest difference of two elements of the same place, and the reference's largest element.

    The difference is infinite where one run lacks the tensor or has it in another shape, or where one alone has no
    number. Tensors of integers (the batches that a normalisation has counted) are no weights.
    """
    names = [name for name in {**reference, **other} if _is_weight(reference.get(name)) or _is_weight(other.get(name))]
    return {name: _apart(reference.get(name), other.get(name)) for name in names}


def convolves(weights: Weights) -> bool:
    """Whether a network has convolutions, whose weights are of shape (out, in, height, width)."""
    return any(value.dim() == 4 for value in weights.values())


def _is_weight(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point()


def _apart(one: Tensor | None, other: Tensor | None) -> Apart:
    largest = 0.0 if one is None or not one.numel() else float(one.abs().max())
    if one is None or other is None or one.shape != other.shape:
        return Apart(math.inf, largest)
    if not one.numel():
        return Apart(0.0, largest)
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    difference = float(torch.where(same, 0.0, (one - other).abs()).max())
    return Apart(math.inf if math.isnan(difference) else difference, largest)
