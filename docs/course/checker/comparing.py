"""Compares tensors of an answer with the right ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cifar_zero import models

TOLERANCE = 1e-4  # relative; the rounding of float32 stays below it, and no mistake does


class Wrong(Exception):
    """An answer is wrong; the message says what differs, with numbers, and a hint."""


def random_images(number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(number, 3, 32, 32), torch.randint(10, (number,))


def new_net() -> nn.Module:
    torch.manual_seed(0)
    return models.build("net", 10)


def gradients_of(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(nn.functional.cross_entropy(model(images), labels), [*model.parameters()])]


def assert_same_gradients(where: str, model: nn.Module, images: Tensor, labels: Tensor, hint: str) -> None:
    for (name, parameter), expected in zip(
        model.named_parameters(), gradients_of(new_net(), images, labels), strict=True
    ):
        assert_same(f"{where}the gradient of {name}", parameter.grad, expected, hint)


def assert_all_same(actual: Any, expected: Mapping[str, tuple[Tensor, str]]) -> None:
    """Raises Wrong unless `actual` is a tuple with the tensors of `expected`, each of which has a name and a hint."""
    if not isinstance(actual, tuple) or len(actual) != len(expected):
        number = f"{len(actual)} values" if isinstance(actual, tuple) else type(actual).__name__
        raise Wrong(f"the result is {number}, not a tuple of {len(expected)}: {', '.join(expected)}")
    for value, (name, (tensor, hint)) in zip(actual, expected.items(), strict=True):
        assert_same(name, value, tensor, hint)


def assert_same(what: str, actual: Any, expected: Tensor, hint: str, tolerance: float = TOLERANCE) -> None:
    """Raises Wrong unless two tensors have the same shape and dtype, and differ relatively by at most `tolerance`."""
    kinds = [
        f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__ for x in (actual, expected)
    ]
    if kinds[0] != kinds[1]:
        raise Wrong(f"{what} is {kinds[0]}, not {kinds[1]}: {hint}")
    error = float((actual - expected).norm() / expected.norm())
    if error <= tolerance:
        return
    factor = float((actual * expected).sum() / expected.square().sum())
    scaled = float((actual - factor * expected).norm()) <= TOLERANCE * float(actual.norm()) and expected.dim()
    values = f"off by {100 * error:.3g} %" if expected.dim() else f"{float(actual):.7g}, not {float(expected):.7g}"
    raise Wrong(f"{what} is {values}{f', {factor:.3g} times the right one' if scaled else ''}: {hint}")
