"""Implements Adagrad, Lion and Muon in torch, and their base class."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import (
    Tensor,
    _foreach_add,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_add_,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_mul,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_mul_,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_sign_,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.optim import Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS
from torch.optim.adagrad import adagrad
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd


class GroupOptimizer(Optimizer):
    """An optimizer that calls `update` for each parameter group, with the parameters that have a gradient. The state is
    created at the first step and not earlier, because ZeRO replaces the model's parameters by flat ones after the
    optimizer has been created."""

    def __init__(self, params: Any, **defaults: Any):
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():  # like torch's optimizers, as Lightning calls hooks within the closure
                loss = closure()
        for group in self.param_groups:
            together: dict[Any, list[Tensor]] = {}  # torch (2.15) does not mix DTensors of several meshes in one call
            for parameter in group["params"]:
                if parameter.grad is not None:
                    together.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
            for parameters in together.values():
                gradients: list[Any] = [parameter.grad for parameter in parameters]
                self.update(parameters, gradients, group)
        return loss

    def update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        """Updates the given parameters of a group in place, with their gradients and the options of the group."""
        raise NotImplementedError

    def zeros(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        """Returns the state tensor `name` of each parameter, which is created with zeros at the first call."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]

    def counts(self, parameters: list[Tensor]) -> list[Tensor]:
        """Returns the step count of each parameter, a float32 scalar on the CPU that starts at 0 and that torch's
        functions increase in place."""
        return [self.state[parameter].setdefault("step", torch.tensor(0.0)) for parameter in parameters]


class TorchAdagrad(GroupOptimizer):
    """Adagrad with torch's update and an L2 penalty.

    torch.optim.Adagrad (2.15) creates its state in its constructor. DeepSpeed (0.19.8) therefore creates another
    Adagrad for ZeRO's flat parameters, which has only one parameter group, and whose learning rate the schedule does
    not change.
    """

    def update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        adagrad(
            parameters,
            gradients,
            self.zeros(parameters, "sum"),
            self.counts(parameters),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            lr_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )


class TorchLion(GroupOptimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2). betas[0] is the weight of
    the momentum in the update's direction, and betas[1] is the decay of the momentum.

    torch (2.15) has no Lion. DeepSpeed's implementations (0.19.8, csrc/lion) take the sign of 0 as 1 or -1, so a weight
    whose gradient is always 0, behind a dead ReLU for example, drifts by the learning rate in each step.
    """

    def update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        means = self.zeros(parameters, "exp_avg")
        direction, decay = group["betas"]
        signs = _foreach_mul(means, direction)
        _foreach_add_(signs, gradients, alpha=1 - direction)
        _foreach_sign_(signs)
        if group["weight_decay"]:
            _foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        _foreach_add_(parameters, signs, alpha=-group["lr"])
        _foreach_mul_(means, decay)
        _foreach_add_(means, gradients, alpha=1 - decay)


class TorchMuon(GroupOptimizer):
    """Updates the weights in parameter groups with the option `muon` by Muon (Jordan et al. 2024). Other groups are
    updated by AdamW if they have the option `betas`, else by SGD with Nesterov's momentum.

    A convolution's weight (out, in, height, width) is treated as the matrix (out, in x height x width), as in Keller
    Jordan's own programs (github.com/KellerJordan/Muon, muon.py, and cifar10-airbench, airbench94_muon.py).
    torch.optim.Muon (2.15) orthogonalises one matrix after the other and accepts no convolutions. With the option
    `betas`, Muon's steps are scaled to the size of AdamW's steps. Without it, Muon's weights are scaled to the length
    sqrt(out) before each step.

    Args:
        fused: whether SGD updates all parameters of a group in one call, on CUDA.
    """

    def __init__(self, params: Any, fused: bool = False, **defaults: Any) -> None:
        self._fused = fused
        super().__init__(params, **{"muon": False, **defaults})

    def update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        if group["muon"]:
            self._muon(parameters, gradients, group)
        elif "betas" in group:
            self._adamw(parameters, gradients, group)
        else:
            self._sgd(parameters, gradients, group)

    def _muon(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        sums = self.zeros(weights, "momentum_buffer")
        _foreach_mul_(sums, group["momentum"])
        _foreach_add_(sums, gradients)
        steps = _foreach_add(gradients, sums, alpha=group["momentum"])  # Nesterov's form
        for numbers in _stacks(weights):
            matrices = torch.stack([weights[number].flatten(1) for number in numbers])  # (weights, out, all else)
            stacked = torch.stack([steps[number].flatten(1) for number in numbers])
            step = orthogonalized(stacked, group["ns_steps"], stacked.device.type)
            scale = 1.0
            if "betas" in group:
                # An update as large as AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2), so
                # that one learning rate and schedule serve both.
                scale = 0.2 * max(matrices.shape[1:]) ** 0.5
            else:
                lengths = torch.linalg.matrix_norm(matrices, keepdim=True)
                matrices *= matrices.shape[1] ** 0.5 / lengths.clamp_min(EPS)  # a layer may begin with zeros
            if group["weight_decay"]:
                matrices *= 1 - group["lr"] * group["weight_decay"]
            matrices.add_(step, alpha=-group["lr"] * scale)
            for number, matrix in zip(numbers, matrices, strict=True):
                weights[number].copy_(matrix.view_as(weights[number]))

    def _adamw(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        adamw(
            parameters,
            gradients,
            self.zeros(parameters, "exp_avg"),
            self.zeros(parameters, "exp_avg_sq"),
            [],
            self.counts(parameters),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=1e-8,  # torch's default for AdamW
            maximize=False,
        )

    def _sgd(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        sgd(
            parameters,
            gradients,
            self.zeros(parameters, "momentum_buffer"),  # pyright: ignore[reportArgumentType]
            fused=self._fused or None,  # with None, torch uses its foreach form on CUDA
            weight_decay=group["weight_decay"],
            momentum=group["sgd_momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["sgd_momentum"] > 0,
            maximize=False,
        )


def orthogonalized(matrices: Tensor, steps: int, device_type: str) -> Tensor:
    """Returns matrices that have the same singular vectors as `matrices` (count, rows, columns), and singular values
    close to 1: after five steps, most lie between 0.7 and 1.2.

    The coefficients of the Newton-Schulz iterations are those of torch.optim.Muon (Jordan et al. 2024,
    kellerjordan.github.io/posts/muon). They run in bfloat16 on CUDA, as in that article, and on the CPU in the
    matrices' dtype, because few CPUs multiply in bfloat16.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices
    if tall:
        x = x.mT
    if device_type == "cuda":
        x = x.bfloat16()
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + EPS)  # makes all singular values at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=DEFAULT_B, alpha=DEFAULT_C), x, beta=DEFAULT_A)
    return (x.mT if tall else x).to(matrices.dtype)


def _stacks(weights: list[Tensor]) -> Iterable[list[int]]:
    """Returns the indices of the weights, grouped by the shape that the weights have as matrices."""
    stacks: dict[tuple[int, int], list[int]] = {}
    for number, weight in enumerate(weights):
        stacks.setdefault((len(weight), weight.numel() // len(weight)), []).append(number)
    return stacks.values()
