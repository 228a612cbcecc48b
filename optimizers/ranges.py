"""What the options of optimizers have in common: the values that they may take."""

import math
from typing import Literal

Implementation = Literal["torch", "torch_fused", "deepspeed_cpu", "deepspeed_fused"]
"""Whose code updates the weights, as the strategy says: torch's, the same in one call for all parameters on CUDA,
DeepSpeed's for an optimizer that is offloaded to the CPU, or DeepSpeed's fused one on CUDA."""

Decayed = Literal["matrices", "all"]
"""Which parameters a weight decay is for: those of two and more dimensions, or every one."""


def check_range(name: str, value: float, below: float = math.inf) -> None:
    """Raises ValueError where a value is negative, not a number, or not below a limit."""
    if not 0 <= value < below:
        limit = "" if below == math.inf else f" and under {below:g}"
        raise ValueError(f"{name} must be at least 0{limit}, not {value}")
