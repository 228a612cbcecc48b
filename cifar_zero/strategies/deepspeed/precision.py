"""Corrects Lightning's precision plugin for DeepSpeed where it changes the maths."""

from typing import Any

from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch import Tensor


class ZeROPrecision(DeepSpeedPrecision):
    """Leaves the division of the loss by the number of accumulated micro-batches to Lightning, and can pass a batch on
    without a cast. Lightning (2.6.6) divides the loss by accumulate_grad_batches, and `engine.backward` (DeepSpeed
    0.19.8) would divide it by gradient_accumulation_steps again. The class can go when Lightning's own plugin passes
    scale_wrt_gas."""

    casts_batches = True
    """Whether to cast each batch to the precision, as Lightning's own plugin does. CIFARModule casts its images itself,
    and its soft labels must not be rounded."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Back-propagates the loss of one micro-batch, which is already divided by the number of micro-batches."""
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def convert_input(self, data: Any) -> Any:
        """Returns the batch, cast only if `casts_batches` is set."""
        if self.casts_batches:
            return super().convert_input(data)
        return data
