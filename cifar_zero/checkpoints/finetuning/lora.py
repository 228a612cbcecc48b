"""LoRA (Hu et al. 2022): trains a product of two small matrices next to a frozen linear layer.

Not Hugging Face's peft: it renames every weight of a plain model (`base_model.model.<layer>.base_layer.weight`,
`lora_A.default.weight`), so that no checkpoint would fit it for --weights, an evaluation or an export. Here a layer
keeps its names, and its adapters are `<layer>.lora_a` and `<layer>.lora_b`.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_zero.config.flags import LoRAConfig
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import nearest_few
from cifar_zero.models.moe import Gate

A, B = ".lora_a", ".lora_b"
"""Suffixes of the adapters' names."""


class LoRALinear(nn.Linear):
    """A linear layer with an adapter: x W^T + bias + alpha / rank * (x A^T) B^T.

    A, (rank, in), is drawn as torch draws a linear layer (Kaiming-uniform with a = sqrt(5)), as in Microsoft's loralib
    and peft. B, (out, rank), is zero: before the first step the output is that of the linear layer, whose parameters,
    sharded by ZeRO-3 or not, are taken over.
    """

    def __init__(self, linear: nn.Linear, lora: LoRAConfig):
        nn.Module.__init__(self)  # not Linear's, which would draw weights
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scale, self.dropout = lora.alpha / lora.rank, lora.dropout
        self.lora_a = nn.Parameter(torch.empty(lora.rank, linear.in_features))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, lora.rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        inner = F.linear(F.dropout(input, self.dropout, self.training), self.lora_a)
        return F.linear(input, self.weight, self.bias) + self.scale * F.linear(inner, self.lora_b)


def adapt(net: nn.Module, lora: LoRAConfig) -> None:
    """Adds an adapter to each linear layer that is a target; none if the rank is 0.

    Raises:
        UsageError: a target is no linear layer of the model.
    """
    if not lora.rank:
        return
    layers = _linear_layers(net)
    for pattern in lora.target:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise UsageError(f"--lora.target {pattern} {_why_none(net, pattern, [*layers])}")
    for name, layer in layers.items():
        if any(fnmatchcase(name, pattern) for pattern in lora.target):
            parent, _, child = name.rpartition(".")
            setattr(net.get_submodule(parent), child, LoRALinear(layer, lora))


def merged(weights: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Returns the weights of the plain model with the same scores, W + alpha / rank * B A in float32."""
    plain = {name: value for name, value in weights.items() if not name.endswith((A, B))}
    for name, b in weights.items():
        if name.endswith(B):
            layer = name.removesuffix(B)
            a, weight = weights[layer + A], f"{layer}.weight"
            plain[weight] = plain[weight].float() + alpha / len(a) * (b.float() @ a.float())
    return plain


def _linear_layers(net: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear layers whose forward pass is used: of a gate, or of torch's attention (a subclass), only the
    weight is read, and an adapter would have no effect."""
    gated = {id(module.wg) for module in net.modules() if isinstance(module, Gate)}
    return {
        name: module for name, module in net.named_modules() if type(module) is nn.Linear and id(module) not in gated
    }


def _why_none(net: nn.Module, pattern: str, layers: list[str]) -> str:
    if not layers:
        return f"cannot have an adapter: {type(net).__name__} has no linear layers"
    named = [module for name, module in net.named_modules() if name and fnmatchcase(name, pattern)]
    if any(isinstance(module, nn.Linear) for module in named):
        return f"cannot have an adapter, only its weight is read: {nearest_few(pattern, layers)}"
    if named:
        return f"is {type(named[0]).__name__}, but adapters need linear layers: {nearest_few(pattern, layers)}"
    return f"is no layer of the model: {nearest_few(pattern, layers)}"
