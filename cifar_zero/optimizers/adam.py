"""Adam and AdamW, and Adam with its state in eight bits."""

from dataclasses import dataclass
from typing import Any, ClassVar

from cifar_zero.core.ranges import check_range
from cifar_zero.optimizers.options import Decay, Implementation, torch_options


@dataclass
class Adam(Decay):
    """Adam with the L2 penalty added to the gradient (Kingma and Ba 2015)"""

    lr: float = 0.001
    """Learning rate."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""

    eps: float = 1e-8
    """Added to the denominator."""

    weight_decay: float = 0.0
    """Weight decay."""

    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_range(self, "lr", "eps", "weight_decay")
        check_range(self, "betas", below=1)

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        """The same update by torch, by DeepSpeedCPUAdam or by FusedAdam."""
        options = torch_options(self)
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


@dataclass
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)"""

    weight_decay: float = 0.01
    """Weight decay, taken from the weights beside the gradient's update."""

    decoupled: ClassVar[bool] = True


@dataclass
class Adam8bit(Adam):
    """Adam with its state in eight bits, by bitsandbytes on CUDA (Dettmers et al. 2022)"""

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        """bitsandbytes' own: one byte for each number of the state, and a scale for each block of them."""
        import bitsandbytes  # pyright: ignore[reportMissingImports]

        return bitsandbytes.optim.Adam8bit(parameters, **torch_options(self))
