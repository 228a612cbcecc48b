"""The older optimizers that scale each weight's step by its own gradients: RMSprop, Adagrad, Adadelta."""

from dataclasses import dataclass
from typing import Any

from cifar_zero.core.ranges import check_range
from cifar_zero.optimizers.options import Decay, Implementation, torch_options


@dataclass
class RMSprop(Decay):
    """RMSprop: steps divided by a running mean of the gradient's size (Tieleman and Hinton 2012)"""

    lr: float = 0.01
    """Learning rate."""

    alpha: float = 0.99
    """Decay of the running mean of the squared gradient."""

    eps: float = 1e-8
    """Added to the denominator."""

    momentum: float = 0.0
    """Share of the last update that is kept."""

    centered: bool = False
    """Divide by the gradient's deviation from its own running mean instead (Graves 2013)."""

    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""

    def __post_init__(self) -> None:
        check_range(self, "lr", "eps", "weight_decay")
        check_range(self, "alpha", "momentum", below=1)

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        """torch's RMSprop whatever the strategy: DeepSpeed has none of its own."""
        import torch

        return torch.optim.RMSprop(parameters, **torch_options(self))


@dataclass
class Adagrad(Decay):
    """Adagrad: steps divided by the size of all gradients so far (Duchi et al. 2011)"""

    lr: float = 0.01
    """Learning rate."""

    eps: float = 1e-10
    """Added to the denominator."""

    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""

    def __post_init__(self) -> None:
        check_range(self, "lr", "eps", "weight_decay")

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        """torch's update whatever the strategy."""
        from cifar_zero.optimizers.torch_updates import TorchAdagrad

        return TorchAdagrad(parameters, **torch_options(self))


@dataclass
class Adadelta(Decay):
    """Adadelta: steps in units of the updates so far (Zeiler 2012)"""

    lr: float = 1.0
    """Factor of the update, whose size is Adadelta's own."""

    rho: float = 0.9
    """Decay of the running means of the squared gradient and update."""

    eps: float = 1e-6
    """Added to the squares: what the first updates grow from."""

    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""

    def __post_init__(self) -> None:
        check_range(self, "lr", "eps", "weight_decay")
        check_range(self, "rho", below=1)

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        """torch's Adadelta whatever the strategy: DeepSpeed has none of its own."""
        import torch

        return torch.optim.Adadelta(parameters, **torch_options(self))
