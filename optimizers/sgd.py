"""Stochastic gradient descent."""

# No postponed annotations here: jsonargparse would execute the TYPE_CHECKING imports, torch, to resolve them.
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimizers.options import Decayed, Implementation
from ranges import check_range

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class SGD:
    """stochastic gradient descent with momentum"""

    lr: float = 0.001
    """Learning rate."""

    momentum: float = 0.9
    """Share of the last update that is kept."""

    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""

    weight_decay_on: Decayed = "matrices"
    """What the weight decay is for. matrices: weights of two and more dimensions, no biases and norms. all: all."""

    nesterov: bool = False
    """Nesterov's form of momentum."""

    def __post_init__(self) -> None:
        check_range("lr", self.lr)
        check_range("momentum", self.momentum, below=1)
        check_range("weight_decay", self.weight_decay)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum")

    def build(self, parameters: Any, implementation: Implementation) -> "Optimizer":
        """torch's SGD whatever the strategy: DeepSpeed has none of its own."""
        import torch

        return torch.optim.SGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            fused=implementation in ("torch_fused", "deepspeed_fused"),
        )
