"""Adam and AdamW, and Adam with its state in eight bits."""

# No postponed annotations here: jsonargparse would execute the TYPE_CHECKING imports, torch, to resolve them.
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from optimizers.options import Decayed, Implementation
from ranges import check_range

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class Adam:
    """Adam with the L2 penalty added to the gradient (Kingma and Ba 2015)"""

    lr: float = 0.001
    """Learning rate."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""

    eps: float = 1e-8
    """Added to the denominator."""

    weight_decay: float = 0.0
    """Weight decay."""

    weight_decay_on: Decayed = "matrices"
    """What the weight decay is for. matrices: weights of two and more dimensions, no biases and norms. all: all."""

    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_range("lr", self.lr)
        for beta in self.betas:
            check_range("betas", beta, below=1)
        check_range("eps", self.eps)
        check_range("weight_decay", self.weight_decay)

    def build(self, parameters: Any, implementation: Implementation) -> "Optimizer":
        """The same update by torch, by DeepSpeedCPUAdam or by FusedAdam."""
        options = self._options()
        if implementation == "deepspeed_cpu":
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            # Without adamw_mode=False both of DeepSpeed's classes decouple the weight decay: their Adam is AdamW.
            return DeepSpeedCPUAdam(parameters, adamw_mode=self.decoupled, **options)
        if implementation == "deepspeed_fused":
            from deepspeed.ops.adam import FusedAdam

            return FusedAdam(parameters, adam_w_mode=self.decoupled, **options)
        import torch

        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(parameters, **options, fused=implementation == "torch_fused")

    def _options(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": tuple(self.betas), "eps": self.eps, "weight_decay": self.weight_decay}


@dataclass
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)"""

    weight_decay: float = 0.01
    """Weight decay, taken from the weights beside the gradient's update."""

    decoupled: ClassVar[bool] = True


@dataclass
class Adam8bit(Adam):
    """Adam with its state in eight bits, by bitsandbytes on CUDA (Dettmers et al. 2022)"""

    def build(self, parameters: Any, implementation: Implementation) -> "Optimizer":
        """bitsandbytes' own: one byte for each number of the state, and a scale for each block of them."""
        import bitsandbytes  # pyright: ignore[reportMissingImports]

        return bitsandbytes.optim.Adam8bit(parameters, **self._options())
