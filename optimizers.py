"""The registry of optimizers: each a dataclass whose fields are the `--optimizer.<option>` flags.

Which implementation runs is the strategy's to say: torch's own, DeepSpeed's CPU Adam where the optimizer state is
offloaded, or DeepSpeed's fused Adam on CUDA.
"""

# No postponed annotations here: jsonargparse would execute the TYPE_CHECKING imports, torch, to resolve them.
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch.optim import Optimizer

Implementation = Literal["torch", "torch_fused", "deepspeed_cpu", "deepspeed_fused"]


@dataclass
class SGD:
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
        _check_range("lr", self.lr)
        _check_range("momentum", self.momentum, below=1)
        _check_range("weight_decay", self.weight_decay)
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

    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_range("lr", self.lr)
        for beta in self.betas:
            _check_range("betas", beta, below=1)
        _check_range("eps", self.eps)
        _check_range("weight_decay", self.weight_decay)

    def build(self, parameters: Any, implementation: Implementation) -> "Optimizer":
        """The same update by torch, by DeepSpeedCPUAdam or by FusedAdam."""
        options: dict[str, Any] = {
            "lr": self.lr,
            "betas": tuple(self.betas),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }
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


def keep_own_options(optimizer: "Optimizer", state: dict[str, Any]) -> dict[str, Any]:
    """A hook for the state of another implementation, or of another device: this one's options stay, but the learning
    rate, which a schedule has moved, is the checkpoint's."""
    groups = [
        {**own, **{key: saved[key] for key in ("lr", "initial_lr", "params") if key in saved}}
        for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    return {**state, "param_groups": groups}


def _check_range(name: str, value: float, below: float = math.inf) -> None:
    """Raises ValueError where a value is negative, not a number, or not below a limit."""
    if not 0 <= value < below:
        limit = "" if below == math.inf else f" and under {below:g}"
        raise ValueError(f"{name} must be at least 0{limit}, not {value}")


OPTIMIZERS: dict[str, type[SGD] | type[Adam]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
