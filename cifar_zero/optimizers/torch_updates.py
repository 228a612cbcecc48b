"""Adagrad and Lion in torch, and the base class of our own optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import (
    Tensor,
    _foreach_add_,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_mul,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_mul_,  # pyright: ignore[reportPrivateImportUsage]
    _foreach_sign_,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.optim import Optimizer
from torch.optim.adagrad import adagrad


class GroupOptimizer(Optimizer):
    """Calls `update` once for each parameter group; the state is made at the first step.

    Not earlier, as ZeRO replaces the model's parameters by flat ones after the optimizer is made.

    Args:
        params: as torch's optimizers take them.
        defaults: of the groups' options.
    """

    def __init__(self, params: Any, **defaults: Any):
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self.update(parameters, [parameter.grad for parameter in parameters], group)
        return loss

    def update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        """Updates the parameters of a group, in place."""
        raise NotImplementedError

    def zeros(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        """Returns a tensor of the state for each parameter, zeros at first."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]

    def counts(self, parameters: list[Tensor]) -> list[Tensor]:
        """Returns the count of steps of each parameter, on the CPU, as torch's functions take it."""
        return [self.state[parameter].setdefault("step", torch.tensor(0.0)) for parameter in parameters]


class TorchAdagrad(GroupOptimizer):
    """torch's update; the options are lr, eps and weight_decay, an L2 penalty.

    torch.optim.Adagrad (2.15) makes the state with the optimizer, and DeepSpeed (0.19.8) then makes another one for
    ZeRO's flat parameters: for one parameter group only, and out of the schedule's reach.
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
    """Algorithm 2 of Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", for all parameters at once.

    The options are lr, weight_decay and betas: share of the momentum in the update's direction, and decay of the
    momentum itself.
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
