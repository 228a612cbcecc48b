"""LoRA (Hu et al. 2022): beside a frozen linear layer, a product of two small matrices is trained.

Not Hugging Face's peft: around a plain network it renames every weight (`base_model.model.<layer>.base_layer.weight`,
`lora_A.default.weight`), so that no checkpoint would fit the plain network, for --weights, an evaluation or an export.
Here a layer keeps its names, and what is beside it is called `<layer>.lora_a` and `<layer>.lora_b`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_zero.config.flags import LoRAConfig
from cifar_zero.core.errors import UsageError
from cifar_zero.core.suggestions import nearest_few
from cifar_zero.models.moe import Gate

A, B = ".lora_a", ".lora_b"
"""Ends of the adapters' names."""


class LoRALinear(nn.Linear):
    """A linear layer with an adapter: x W^T + bias + alpha / rank * (x A^T) B^T.

    A, (rank, in), is drawn as Microsoft's loralib and peft do (Kaiming-uniform with a = sqrt(5), which is how torch
    draws a linear layer), B, (out, rank), is zero: before the first step the layer does what it did.

    Args:
        linear: whose parameters it takes over, sharded by ZeRO-3 or not.
        lora: rank, alpha and dropout.
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
    """Puts an adapter beside each linear layer of a network that is a target; none where the rank is 0.

    Raises:
        UsageError: a target is no linear layer of the network.
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
    """The weights of the plain network that does what one with adapters does, W + alpha / rank * B A in float32; those
    of a network without adapters as they are."""
    plain = {name: value for name, value in weights.items() if not name.endswith((A, B))}
    for name, b in weights.items():
        if name.endswith(B):
            layer = name.removesuffix(B)
            a, weight = weights[layer + A], f"{layer}.weight"
            plain[weight] = plain[weight].float() + alpha / len(a) * (b.float() @ a.float())
    return plain


def _linear_layers(net: nn.Module) -> dict[str, nn.Linear]:
    """Those that are called. A subclass may be read by its weight alone, as torch's attention does with its output, and
    so is the layer of a gate: an adapter would be without effect there."""
    gated = {id(module.wg) for module in net.modules() if isinstance(module, Gate)}
    return {
        name: module for name, module in net.named_modules() if type(module) is nn.Linear and id(module) not in gated
    }


def _why_none(net: nn.Module, pattern: str, layers: list[str]) -> str:
    if not layers:
        return f"cannot have an adapter: {type(net).__name__} has no linear layers"
    named = [module for name, module in net.named_modules() if name and fnmatchcase(name, pattern)]
    if any(isinstance(module, nn.Linear) for module in named):
        return f"is read by its weight alone, an adapter would be without effect: {nearest_few(pattern, layers)}"
    if named:
        return f"is {type(named[0]).__name__}, and adapters are for linear layers: {nearest_few(pattern, layers)}"
    return f"is no layer of the network: {nearest_few(pattern, layers)}"
