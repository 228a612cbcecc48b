"""Muon."""

# No postponed annotations here: jsonargparse would execute the TYPE_CHECKING imports, torch, to resolve them.
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimizers.options import Decayed, Implementation
from ranges import check_range

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class Muon:
    """Muon: hidden weight matrices by orthogonalised momentum (Jordan et al. 2024), all else by AdamW"""

    lr: float = 0.001
    """Learning rate of both: Muon's steps are scaled to the size of AdamW's (Liu et al. 2025)."""

    momentum: float = 0.95
    """Decay of the running mean of the gradient, in Nesterov's form."""

    ns_steps: int = 5
    """Newton-Schulz iterations that orthogonalise a matrix."""

    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""

    weight_decay: float = 0.01
    """Weight decay, taken from the weights beside the update."""

    weight_decay_on: Decayed = "matrices"
    """What the weight decay is for. matrices: weights of two and more dimensions, no biases and norms. all: all."""

    def __post_init__(self) -> None:
        check_range("lr", self.lr)
        check_range("momentum", self.momentum, below=1)
        for beta in self.betas:
            check_range("betas", beta, below=1)
        check_range("weight_decay", self.weight_decay)
        if not 1 <= self.ns_steps < 100:  # torch's own limit
            raise ValueError(f"ns_steps must be from 1 to 99, not {self.ns_steps}")

    def build(self, parameters: Any, implementation: Implementation) -> "Optimizer":
        """torch's Muon and AdamW in one, whatever the strategy; `parameters` are groups that say which is whose."""
        from optimizers.torch_muon import TorchMuon

        return TorchMuon(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            ns_steps=self.ns_steps,
            betas=(self.betas[0], self.betas[1]),
            weight_decay=self.weight_decay,
        )
