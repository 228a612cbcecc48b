"""Initial weights by the book, in place of those that each layer of torch draws for itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    # Uniform with variance 2 / (fan_in + fan_out): keeps the variance of activations and of gradients about the same,
    # with a tanh between the layers (Glorot and Bengio 2010, equation 16).
    "xavier": nn.init.xavier_uniform_,
    # Normal with variance 2 / fan_in: a ReLU lets half of the variance pass (He et al. 2015, equation 10).
    "he": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
}


def initialize(net: nn.Module, scheme: str, seed: int) -> None:
    """Draws the weights of all convolutions and linear layers anew, and sets their biases to zero.

    Drawn layer by layer in the network's order, whatever the network has drawn for itself before. DeepSpeed's zero.Init
    puts its own `Module.apply` in place of torch's: a layer that it has sharded is put together, drawn and sharded
    again (DeepSpeed 0.19.8, deepspeed/runtime/zero/partition_parameters.py).

    Args:
        net: of any kind; norms and other parameters stay as they are.
        scheme: key of SCHEMES, or `default`: all weights stay as torch's layers drew them.
        seed: of torch's global random state, which draws them.
    """
    if scheme == "default":
        return
    draw = SCHEMES[scheme]
    torch.manual_seed(seed)

    def initialize_layer(layer: nn.Module) -> None:
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            draw(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    net.apply(initialize_layer)
