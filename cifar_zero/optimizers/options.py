"""What the options of optimizers have in common."""

from dataclasses import dataclass, fields
from typing import Any, Literal

Implementation = Literal["torch", "torch_fused", "deepspeed_cpu", "deepspeed_fused"]
"""Whose code updates the weights, as the strategy says: torch's, the same in one call for all parameters on CUDA,
DeepSpeed's for an optimizer that is offloaded to the CPU, or DeepSpeed's fused one on CUDA."""


@dataclass
class Decay:
    """Which parameters decay: an option of every optimizer."""

    weight_decay_on: Literal["matrices", "all"] = "matrices"
    """What the weight decay is for. matrices: weights of two and more dimensions, no biases and norms. all: all."""


def torch_options(options: Any) -> dict[str, Any]:
    """The fields as torch's optimizers take them, without `weight_decay_on`, which has its say in the groups."""
    values = {field.name: getattr(options, field.name) for field in fields(options) if field.name != "weight_decay_on"}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
