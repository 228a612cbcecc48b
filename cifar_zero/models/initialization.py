"""Initial weights by Xavier's or He's scheme, instead of those that torch's layers draw."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    # Uniform with variance 2 / (fan_in + fan_out): keeps the variance of activations and gradients about the same
    # with a tanh between the layers (Glorot and Bengio 2010, equation 16).
    "xavier": nn.init.xavier_uniform_,
    # Normal with variance 2 / fan_in: a ReLU halves the variance (He et al. 2015, equation 10).
    "he": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
}


def initialize(net: nn.Module, scheme: str, seed: int) -> None:
    """Draws the weights of all convolutions and linear layers again, and sets their biases to zero; with the scheme
    `default` all weights stay as torch's layers drew them.

    DeepSpeed's zero.Init replaces `Module.apply` by its own, which gathers a sharded layer, draws it and shards it
    again (DeepSpeed 0.19.8, deepspeed/runtime/zero/partition_parameters.py).
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
