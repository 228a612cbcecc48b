"""Muon and AdamW by torch, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, muon
from torch.optim.adamw import adamw

ADAMW_EPS = 1e-8
"""Added to AdamW's denominator: torch's default."""


class TorchMuon(Optimizer):
    """torch's own updates, which one group gets saying `muon`: torch.optim.Muon (2.15) takes nothing but matrices.

    A convolution's weight (out, in, height, width) is the matrix (out, in x height x width), as in Keller Jordan's own
    program (github.com/KellerJordan/Muon, muon.py).

    Args:
        params: groups; `muon` in a group says whether its parameters, of two and more dimensions, are Muon's.
        lr: learning rate of both.
        momentum: Muon's.
        ns_steps: Newton-Schulz iterations.
        betas: AdamW's.
        weight_decay: taken from the weights beside the update.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float, ns_steps: int, betas: tuple[float, float], weight_decay: float
    ):
        options = {"lr": lr, "momentum": momentum, "ns_steps": ns_steps, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {**options, "muon": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            (self._muon if group["muon"] else self._adamw)(parameters, group)
        return loss

    def _muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        muon(
            [_matrix(parameter) for parameter in parameters],
            [_matrix(parameter.grad) for parameter in parameters],
            [_matrix(self.state[parameter]["momentum_buffer"]) for parameter in parameters],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=True,
            ns_coefficients=(DEFAULT_A, DEFAULT_B, DEFAULT_C),
            ns_steps=group["ns_steps"],
            eps=EPS,
            # 0.2 sqrt(max(rows, columns)): an update as large as AdamW's (Liu et al. 2025, "Muon is Scalable for LLM
            # Training", section 2.2), so that one learning rate and schedule serve both.
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] |= {"step": torch.tensor(0.0), **zeros}
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],  # pyright: ignore[reportArgumentType]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=ADAMW_EPS,
            maximize=False,
        )


def _matrix(weight: Any) -> Tensor:
    """The same memory as (out, all else); `view` raises where that would need a copy, which no update would reach."""
    return weight.view(len(weight), -1)
