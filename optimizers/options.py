"""What the options of optimizers have in common."""

from typing import Literal

Implementation = Literal["torch", "torch_fused", "deepspeed_cpu", "deepspeed_fused"]
"""Whose code updates the weights, as the strategy says: torch's, the same in one call for all parameters on CUDA,
DeepSpeed's for an optimizer that is offloaded to the CPU, or DeepSpeed's fused one on CUDA."""

Decayed = Literal["matrices", "all"]
"""Which parameters a weight decay is for: those of two and more dimensions, or every one."""
