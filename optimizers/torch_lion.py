"""Lion in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import _foreach_add_, _foreach_mul, _foreach_mul_, _foreach_sign_  # pyright: ignore[reportPrivateImportUsage]
from torch.optim import Optimizer


class TorchLion(Optimizer):
    """Algorithm 2 of Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", for all parameters at once.

    Args:
        params: as torch's optimizers take them.
        lr: learning rate.
        betas: share of the momentum in the update's direction, and decay of the momentum itself.
        weight_decay: taken from the weights beside the update.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            gradients = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            means = [self.state[parameter]["exp_avg"] for parameter in parameters]
            direction, decay = group["betas"]
            signs = _foreach_mul(means, direction)
            _foreach_add_(signs, gradients, alpha=1 - direction)
            _foreach_sign_(signs)
            if group["weight_decay"]:
                _foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            _foreach_add_(parameters, signs, alpha=-group["lr"])
            _foreach_mul_(means, decay)
            _foreach_add_(means, gradients, alpha=1 - decay)
        return loss
