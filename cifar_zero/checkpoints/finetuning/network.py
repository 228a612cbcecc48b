"""The model of a run, of which all, a part or adapters are trained. A frozen parameter has no gradient."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cifar_zero import models
from cifar_zero.checkpoints.finetuning.lora import A, B, LoRALinear, adapt
from cifar_zero.config.flags import Choice, LoRAConfig
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import nearest_few
from cifar_zero.models.initialization import initialize
from cifar_zero.models.moe import whole_names

NO_LORA = LoRAConfig()

EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")
"""Part of the name of an expert's parameter."""


def build(
    model: Choice,
    num_classes: int,
    trainable: Sequence[str] = (),
    lora: LoRAConfig = NO_LORA,
    init: str = "default",
    seed: int = 0,
) -> nn.Module:
    """Returns the model with fresh weights (`initialization.initialize`), adapters (`lora.adapt`) and `freeze`.

    Raises:
        UsageError: a target of LoRA is no linear layer.
    """
    net = models.build(model.name, num_classes, **model.options)
    initialize(net, init, seed)
    adapt(net, lora)
    freeze(net, trainable)
    return net


def on_meta(model: Choice, num_classes: int, trainable: Sequence[str] = (), lora: LoRAConfig = NO_LORA) -> nn.Module:
    """Returns the model of `build` with shapes and without values."""
    with torch.device("meta"):
        return build(model, num_classes, trainable, lora)


def freeze(net: nn.Module, trainable: Sequence[str]) -> None:
    """Freezes all parameters except adapters and those that a pattern of `fnmatch` names; none without patterns and
    adapters. A rank may have only its share of the experts, or of each parameter."""
    adapted = any(isinstance(module, LoRALinear) for module in net.modules())
    if not trainable and not adapted:
        return
    whole = whole_names(net)
    for name, parameter in net.named_parameters():
        named = any(fnmatchcase(whole[name], pattern) for pattern in trainable)
        parameter.requires_grad_(named or name.endswith((A, B)))


def check_patterns(net: nn.Module, trainable: Sequence[str], ep_size: int) -> None:
    """Refuses patterns that match nothing, or not all experts of a mixture that is spread over `ep_size` ranks: each
    rank trains the same parameters of its experts. The model is the whole one after `freeze`, or its shapes.

    Raises:
        UsageError: names the first such pattern.
    """
    names = [name for name, _ in net.named_parameters()]
    for pattern in trainable:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"--trainable {pattern} matches no parameter of the model: {nearest_few(pattern, names)}")
    if ep_size > 1:
        of_experts: dict[str, set[bool]] = {}
        for name, parameter in net.named_parameters():
            of_experts.setdefault(EXPERT_NUMBER.sub(".experts.*.", name), set()).add(parameter.requires_grad)
        for name, trained in of_experts.items():
            if len(trained) > 1:
                raise UsageError(f"--trainable: --model.ep_size {ep_size} needs all experts or none, as in {name}")


def trained_names(net: nn.Module) -> set[str]:
    """Returns the names of what training changes: parameters that are not frozen, and the buffers of their layers."""
    found: set[str] = set()
    for prefix, module in net.named_modules():
        trained = [name for name, own in module.named_parameters(recurse=False) if own.requires_grad]
        buffers = [name for name, _ in module.named_buffers(recurse=False)] if trained else []
        found |= {f"{prefix}.{name}".removeprefix(".") for name in (*trained, *buffers)}
    return found


def rest_statistics(net: nn.Module) -> None:
    """Makes the `resting` batch norms keep their statistics, as torchvision's FrozenBatchNorm2d does."""
    for norm in resting(net):
        norm.eval()


def counting(net: nn.Module) -> list[_BatchNorm]:
    """Returns the batch norms whose statistics training changes."""
    rest = {*resting(net)}
    return [module for module in net.modules() if isinstance(module, _BatchNorm) and module not in rest]


def resting(net: nn.Module) -> list[_BatchNorm]:
    """Returns the batch norms without a trained parameter in a model with frozen ones."""
    if all(parameter.requires_grad for parameter in net.parameters()):
        return []
    norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in norms if not any(parameter.requires_grad for parameter in norm.parameters())]
