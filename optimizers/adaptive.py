"""The older optimizers that scale each weight's step by its own gradients: RMSprop, Adagrad, Adadelta."""

# No postponed annotations here: jsonargparse would execute the TYPE_CHECKING imports, torch, to resolve them.
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimizers.options import Decayed, Implementation
from ranges import check_range

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class RMSprop:
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

    weight_decay_on: Decayed = "matrices"
    """What the weight decay is for. matrices: weights of two and more dimensions, no biases and norms. all: all."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_range(name, getattr(self, name))
        for name in ("alpha", "momentum"):
            check_range(name, getattr(self, name), below=1)

    def build(self, parameters: Any, implementation: Implementation) -> "Optimizer":
        """torch's RMSprop whatever the strategy: DeepSpeed has none of its own."""
        import torch

        return torch.optim.RMSprop(
            parameters,
            lr=self.lr,
            alpha=self.alpha,
            eps=self.eps,
            momentum=self.momentum,
            centered=self.centered,
            weight_decay=self.weight_decay,
        )


@dataclass
class Adagrad:
    """Adagrad: steps divided by the size of all gradients so far (Duchi et al. 2011)"""

    lr: float = 0.01
    """Learning rate."""

    eps: float = 1e-10
    """Added to the denominator."""

    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""

    weight_decay_on: Decayed = "matrices"
    """What the weight decay is for. matrices: weights of two and more dimensions, no biases and norms. all: all."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_range(name, getattr(self, name))

    def build(self, parameters: Any, implementation: Implementation) -> "Optimizer":
        """The same update by torch, or by DeepSpeedCPUAdagrad."""
        options: dict[str, Any] = {"lr": self.lr, "eps": self.eps, "weight_decay": self.weight_decay}
        if implementation == "deepspeed_cpu":
            from optimizers.cpu_adagrad import CPUAdagrad

            return CPUAdagrad(parameters, **options)
        from optimizers.torch_adagrad import TorchAdagrad

        return TorchAdagrad(parameters, **options)


@dataclass
class Adadelta:
    """Adadelta: steps in units of the updates so far (Zeiler 2012)"""

    lr: float = 1.0
    """Factor of the update, whose size is Adadelta's own."""

    rho: float = 0.9
    """Decay of the running means of the squared gradient and update."""

    eps: float = 1e-6
    """Added to the squares: what the first updates grow from."""

    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""

    weight_decay_on: Decayed = "matrices"
    """What the weight decay is for. matrices: weights of two and more dimensions, no biases and norms. all: all."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_range(name, getattr(self, name))
        check_range("rho", self.rho, below=1)

    def build(self, parameters: Any, implementation: Implementation) -> "Optimizer":
        """torch's Adadelta whatever the strategy: DeepSpeed has none of its own."""
        import torch

        return torch.optim.Adadelta(parameters, lr=self.lr, rho=self.rho, eps=self.eps, weight_decay=self.weight_decay)
