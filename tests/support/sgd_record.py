"""Records of a small training in plain torch, with faults on request."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cifar_zero.comparison.recorded.record import Record

STEPS = 6
SHAPES = {"a": (7, 5), "b": (5, 3), "norm": (5,)}

Change = Callable[[int, str, Tensor], Tensor]


def trained(
    distance: float = 0.0, initial: Change | None = None, gradient: Change | None = None, update: Change | None = None
) -> Record:
    """Returns the record of SGD on a least-squares problem.

    Args:
        distance: relative change of the initial weights.
        initial: changes an initial weight: step 0, its name, its value.
        gradient: changes a gradient before it is used.
        update: changes what a step adds to a weight.
    """
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) * (1 + distance) for name, shape in SHAPES.items()}
    images, targets = torch.randn(64, 7), torch.randn(64, 3)
    if initial is not None:
        weights = {name: initial(0, name, value) for name, value in weights.items()}
    record = Record(weights=[dict(weights)])
    for step in range(1, STEPS + 1):
        leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
        loss = ((images @ leaves["a"] * leaves["norm"]) @ leaves["b"] - targets).square().mean()
        found = torch.autograd.grad(loss, [*leaves.values()])
        gradients = dict(zip(leaves, found, strict=True))
        if gradient is not None:
            gradients = {name: gradient(step, name, value) for name, value in gradients.items()}
        rate = 0.01 / step
        updates = {name: -rate * value for name, value in gradients.items()}
        if update is not None:
            updates = {name: update(step, name, value) for name, value in updates.items()}
        weights = {name: weights[name] + updates[name] for name in weights}
        record.losses.append(loss.item())
        record.rates.append([rate])
        record.gradients.append(gradients)
        record.weights.append(dict(weights))
    return record
