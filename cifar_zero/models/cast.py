"""Casts buffers to half precision, but not the running statistics of batch norms. A training step moves a running
statistic by a tenth of its distance to the batch's statistic. With the 8 bits of bfloat16, this is rounded away if the
distance is under 2 to 4 % of the running statistic. stepcheck's `cast_batch_norm_weights` makes batch norms accept
float32 statistics."""

import torch
from torch import nn

STATISTICS = ("running_mean", "running_var")
"""Names of the buffers of batch norms that stay in float32."""


def cast_buffers(net: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating-point buffers of a model in place, except the running statistics of batch norms."""
    for name, buffer in net.named_buffers():
        if buffer.is_floating_point() and not name.endswith(STATISTICS):
            buffer.data = buffer.data.to(dtype)
