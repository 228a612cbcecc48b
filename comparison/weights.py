"""How far the weights of two runs are apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
"""By their names in the plain network."""


def difference(one: Weights, other: Weights) -> float:
    """The largest difference of any two elements of the same place; infinite where names or shapes differ, NaN where
    one alone is no number."""
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        return float("inf")
    largest = [_difference(one[name].double(), other[name].double()) for name in one]
    return float(torch.stack(largest).max()) if largest else 0.0


def largest(weights: Weights) -> float:
    """The largest absolute value of any element."""
    return max((float(value.abs().max()) for value in weights.values() if value.numel()), default=0.0)


def _difference(one: Tensor, other: Tensor) -> Tensor:
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one - other).abs()).amax() if one.numel() else torch.zeros((), dtype=torch.float64)
