"""Draws initial weights by Xavier's or He's scheme, in place of the defaults of torch's layers. `DrawnOnCPU` makes
initial weights the same on every device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    # Uniform with variance 2 / (fan_in + fan_out): keeps the variance of activations and gradients about the same
    # with a tanh between the layers (Glorot and Bengio 2010, equation 16).
    "xavier": nn.init.xavier_uniform_,
    # Normal with variance 2 / fan_in, because a ReLU halves the variance (He et al. 2015, equation 10).
    "he": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
}


RANDOM = (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default)  # operations that fill a tensor


class DrawnOnCPU(TorchDispatchMode):
    """Mode in which uniform_, normal_ and randn take their random numbers from the CPU's generator, for tensors on a
    GPU too. A model then starts from the same weights whether a strategy builds it on the GPU, or on the CPU, as fsdp2
    does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM and args[0].device.type not in ("cpu", "meta"):
            return args[0].copy_(func(torch.empty_like(args[0], device="cpu"), *args[1:], **kwargs))
        if func is torch.ops.aten.randn.default and torch.device(kwargs.get("device") or "cpu").type != "meta":
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs.get("device"))
        return func(*args, **kwargs)


def initialize(net: nn.Module, scheme: str, seed: int) -> None:
    """Draws the weights of all convolutions and linear layers again by a scheme of SCHEMES, in place, and sets their
    biases to zero. First seeds torch's generators with `seed`. With the scheme `default`, does nothing. Sharded layers
    are initialised too, because DeepSpeed's zero.Init replaces `Module.apply` by a function that gathers each layer
    first (DeepSpeed 0.19.8, deepspeed/runtime/zero/partition_parameters.py)."""
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
