"""Which parameters are trained; the others are frozen: no gradient, no optimizer state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cifar_zero.checkpoints.finetuning.lora import A, B, LoRALinear
from cifar_zero.core.errors import UsageError
from cifar_zero.core.suggestions import nearest_few
from cifar_zero.models.moe import whole_names

EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")
"""In the name of an expert's parameter."""


def freeze(net: nn.Module, trainable: Sequence[str]) -> None:
    """Freezes the parameters that no pattern names, but adapters; without patterns and adapters none.

    Args:
        net: of which a rank may have its share of the experts alone, or of each parameter.
        trainable: patterns of `fnmatch`, whose * stands for dots too.
    """
    adapted = any(isinstance(module, LoRALinear) for module in net.modules())
    if not trainable and not adapted:
        return
    whole = whole_names(net)
    for name, parameter in net.named_parameters():
        named = any(fnmatchcase(whole[name], pattern) for pattern in trainable)
        parameter.requires_grad_(named or name.endswith((A, B)))


def check_patterns(net: nn.Module, trainable: Sequence[str], ep_size: int) -> None:
    """Refuses patterns that name nothing, or not all experts of a mixture where these are spread over ranks.

    Args:
        net: the whole network, `freeze` done; one on torch's meta device will do.
        trainable: see `freeze`.
        ep_size: ranks that share the experts of a mixture out, each of which trains the same parameters of its own.

    Raises:
        UsageError: names the first such pattern.
    """
    names = [name for name, _ in net.named_parameters()]
    for pattern in trainable:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"--trainable {pattern} is no parameter of the network: {nearest_few(pattern, names)}")
    if ep_size > 1:
        of_experts: dict[str, set[bool]] = {}
        for name, parameter in net.named_parameters():
            of_experts.setdefault(EXPERT_NUMBER.sub(".experts.*.", name), set()).add(parameter.requires_grad)
        for name, trained in of_experts.items():
            if len(trained) > 1:
                raise UsageError(f"--trainable: with --model.ep_size {ep_size} it is all experts or none, as in {name}")


def trained_names(net: nn.Module) -> set[str]:
    """Of what training changes: parameters that are not frozen, and the buffers of their layers."""
    found: set[str] = set()
    for prefix, module in net.named_modules():
        own = dict(module.named_parameters(recurse=False))
        trained = [name for name, parameter in own.items() if parameter.requires_grad]
        if trained:
            found |= {".".join(filter(None, [prefix, name])) for name in (*trained, *_buffers(module))}
    return found


def rest_statistics(net: nn.Module) -> None:
    """Has the batch norms without a trained parameter, in a network that has frozen ones, keep the statistics that they
    have, as torchvision's FrozenBatchNorm2d does: else frozen layers would not stay what they were."""
    for norm in resting(net):
        norm.eval()


def counting(net: nn.Module) -> list[_BatchNorm]:
    """The other batch norms: training changes their statistics."""
    rest = {*resting(net)}
    return [module for module in net.modules() if isinstance(module, _BatchNorm) and module not in rest]


def resting(net: nn.Module) -> list[_BatchNorm]:
    """The batch norms of `rest_statistics`."""
    if all(parameter.requires_grad for parameter in net.parameters()):
        return []
    norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in norms if not any(parameter.requires_grad for parameter in norm.parameters())]


def _buffers(module: nn.Module) -> Iterable[str]:
    return (name for name, _ in module.named_buffers(recurse=False))
