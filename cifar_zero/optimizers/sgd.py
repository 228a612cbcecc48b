"""Stochastic gradient descent."""

from dataclasses import dataclass
from typing import Any

from cifar_zero.core.ranges import check_range
from cifar_zero.optimizers.options import Decay, Implementation, torch_options


@dataclass
class SGD(Decay):
    """stochastic gradient descent with momentum"""

    lr: float = 0.001
    """Learning rate."""

    momentum: float = 0.9
    """Share of the last update that is kept."""

    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""

    nesterov: bool = False
    """Nesterov's form of momentum."""

    def __post_init__(self) -> None:
        check_range(self, "lr", "weight_decay")
        check_range(self, "momentum", below=1)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum")

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        """torch's SGD whatever the strategy: DeepSpeed has none of its own."""
        import torch

        fused = implementation in ("torch_fused", "deepspeed_fused")
        return torch.optim.SGD(parameters, **torch_options(self), fused=fused)
