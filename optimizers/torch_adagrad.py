"""Adagrad by torch, for parameters that are exchanged after the optimizer was made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adagrad import adagrad


class TorchAdagrad(Optimizer):
    """torch's update, its state made at the first step.

    torch.optim.Adagrad (2.15) makes the state with the optimizer. ZeRO puts flat parameters in place of the network's
    afterwards, and DeepSpeed (0.19.8) then makes another torch.optim.Adagrad of them: of one parameter group only, and
    out of the schedule's reach.

    Args:
        params: as torch's optimizers take them.
        lr: learning rate.
        eps: added to the denominator.
        weight_decay: L2 penalty, added to the gradient.
    """

    def __init__(self, params: Any, lr: float, eps: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state(parameter) for parameter in parameters]
            adagrad(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["sum"] for state in states],
                [state["step"] for state in states],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                lr_decay=0.0,
                eps=group["eps"],
                maximize=False,
            )
        return loss

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state |= {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter)}
        return state
