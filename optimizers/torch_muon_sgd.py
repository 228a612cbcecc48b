"""Muon and SGD as one optimizer, Muon for all filters of a shape at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import (
    Tensor,
    _foreach_add,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_add_,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_mul_,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.optim import Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS
from torch.optim.sgd import sgd


class TorchMuonSGD(Optimizer):
    """The update of Keller Jordan's airbench94_muon.py (github.com/KellerJordan/cifar10-airbench).

    A convolution's weight (out, in, height, width) is the matrix (out, in x height x width). torch.optim.Muon (2.15)
    orthogonalises one matrix after the other, takes no convolutions and does not normalise the weights.

    Args:
        params: groups; `muon` in a group says whether its parameters, of two and more dimensions, are Muon's.
        lr: learning rate of the groups that have none of their own.
        momentum: Muon's.
        ns_steps: Newton-Schulz iterations.
        normalize: whether Muon's weights are brought to the length sqrt(out) before each step.
        sgd_momentum: SGD's.
        fused: whether SGD is one call for all parameters of a group, on CUDA.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float,
        ns_steps: int,
        normalize: bool,
        sgd_momentum: float,
        fused: bool = False,
    ) -> None:
        self._fused = fused
        options = {"momentum": momentum, "ns_steps": ns_steps, "normalize": normalize, "sgd_momentum": sgd_momentum}
        super().__init__(params, {"lr": lr, **options, "weight_decay": 0.0, "muon": False, "schedule_share": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                (self._muon if group["muon"] else self._sgd)(parameters, group)
        return loss

    def _muon(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        gradients, sums = self._gradients(weights), self._momenta(weights)
        _foreach_mul_(sums, group["momentum"])
        _foreach_add_(sums, gradients)
        steps = _foreach_add(gradients, sums, alpha=group["momentum"])  # Nesterov's form
        for numbers in _by_shape(weights):
            matrices = torch.stack([weights[number].flatten(1) for number in numbers])  # (filters, out, all else)
            stacked = torch.stack([steps[number].flatten(1) for number in numbers])
            step = orthogonalized(stacked, group["ns_steps"], stacked.device.type)
            if group["normalize"]:
                lengths = torch.linalg.matrix_norm(matrices, keepdim=True)
                matrices *= matrices.shape[1] ** 0.5 / lengths
            matrices.add_(step, alpha=-group["lr"])
            for number, matrix in zip(numbers, matrices, strict=True):
                weights[number].copy_(matrix.view_as(weights[number]))

    def _sgd(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        sgd(
            parameters,
            self._gradients(parameters),
            self._momenta(parameters),  # pyright: ignore[reportArgumentType]
            fused=self._fused or None,  # None: torch takes its foreach form on CUDA
            weight_decay=group["weight_decay"],
            momentum=group["sgd_momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["sgd_momentum"] > 0,
            maximize=False,
        )

    @staticmethod
    def _gradients(parameters: list[Tensor]) -> list[Any]:
        return [parameter.grad for parameter in parameters]

    def _momenta(self, parameters: list[Tensor]) -> list[Tensor]:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return [self.state[parameter]["momentum_buffer"] for parameter in parameters]


def orthogonalized(matrices: Tensor, steps: int, device_type: str) -> Tensor:
    """Matrices (count, rows, columns) with singular values of roughly 1 and the same singular vectors, by Newton-Schulz
    iterations with the coefficients that torch.optim.Muon has from Jordan et al. 2024
    (kellerjordan.github.io/posts/muon): most of the values come to lie between 0.7 and 1.2 after five steps.

    On CUDA in bfloat16, as there; on the CPU, few of which multiply in it, in the matrices' own type. Without
    iterations a matrix is only brought to the length that it would have if all of its singular values were 1.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x.bfloat16() if device_type == "cuda" else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + EPS)  # then no singular value is over 1
    if not steps:
        x = x * x.shape[1] ** 0.5
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=DEFAULT_B, alpha=DEFAULT_C), x, beta=DEFAULT_A)
    return (x.mT if tall else x).to(matrices.dtype)


def _by_shape(weights: list[Tensor]) -> list[list[int]]:
    """Numbers of the weights that are matrices of one shape."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for number, weight in enumerate(weights):
        shapes.setdefault((len(weight), weight.numel() // len(weight)), []).append(number)
    return [*shapes.values()]
