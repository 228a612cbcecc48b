"""Builds the model of a run, and selects which of its parameters are trained: all, some, or only LoRA adapters.

An adapter trains the product of two small matrices next to a frozen linear layer (Hu et al. 2022). Hugging Face's peft
is not used, because it renames every weight of a plain model (`base_model.model.<layer>.base_layer.weight`), so that no
checkpoint would fit the plain model. Here the weights of a layer keep their names, and the two matrices of an adapter
are named `<layer>.lora_a` and `<layer>.lora_b`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cifar_zero import models
from cifar_zero.config.recipe import LoRAConfig, Recipe
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import nearest
from cifar_zero.models.initialization import DrawnOnCPU, initialize
from cifar_zero.models.moe import Gate


def create_model(recipe: Recipe, num_classes: int) -> nn.Module:
    """Returns the model of a recipe, with fresh weights (see `initialization.initialize`), adapters (see `adapt`) and
    frozen parameters (see `freeze`). Raises UsageError if a pattern of --lora.target matches no linear layer that can
    have an adapter."""
    with DrawnOnCPU():
        net = models.build(recipe.model.name, num_classes, **recipe.model.options)
        initialize(net, recipe.init, recipe.seed)
        adapt(net, recipe.lora)
    freeze(net, recipe.trainable)
    return net


def create_meta_model(recipe: Recipe, num_classes: int) -> nn.Module:
    """Returns the model of a recipe on the meta device, where parameters have shapes but no values. Raises UsageError
    like `create_model`, and if an option makes a tensor that is too large for torch."""
    try:
        with torch.device("meta"):
            return create_model(replace(recipe, init="default"), num_classes)
    except (RuntimeError, TypeError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise UsageError(f"--model {recipe.model.name}: its options make a tensor that is too large") from error


def freeze(net: nn.Module, trainable: Sequence[str]) -> None:
    """Trains only the adapters of `net` and the parameters whose name matches a pattern in `trainable` (see `fnmatch`),
    and freezes all others, in place. Without patterns and adapters, changes nothing."""
    adapted = any(isinstance(module, LoRALinear) for module in net.modules())
    if not trainable and not adapted:
        return
    for name, parameter in net.named_parameters():
        named = any(fnmatchcase(name, pattern) for pattern in trainable)
        parameter.requires_grad_(named or name.endswith((A, B)))


def check_patterns(net: nn.Module, trainable: Sequence[str], ep_size: int) -> None:
    """Raises UsageError for the first pattern of --trainable that matches no parameter of `net`, the full model after
    `freeze`. With experts that are distributed over ranks (`ep_size` above 1), also for the first parameter that is
    trained in some experts only."""
    names = [name for name, _ in net.named_parameters()]
    for pattern in trainable:
        if not any(fnmatchcase(name, pattern) for name in names):
            meant = nearest(pattern, names, 3, 0.3)
            raise UsageError(f"--trainable {pattern} matches no parameter of the model: {meant}")
    if ep_size > 1:
        of_experts: dict[str, set[bool]] = {}
        for name, parameter in net.named_parameters():
            of_experts.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.*.", name), set()).add(parameter.requires_grad)
        for name, trained in of_experts.items():
            if len(trained) > 1:
                raise UsageError(f"--trainable: with --model.ep_size {ep_size} train all or none of {name}")


def trained_names(net: nn.Module) -> set[str]:
    """Returns the names of the tensors of `net` that training may change: the parameters that are not frozen, and the
    buffers of layers with such a parameter. If no parameter of `net` is frozen, all buffers are included."""
    names: set[str] = set()
    complete = all(parameter.requires_grad for parameter in net.parameters())
    for prefix, module in net.named_modules():
        trained = [name for name, own in module.named_parameters(prefix, recurse=False) if own.requires_grad]
        names.update(trained)
        if trained or complete:
            names.update(dict(module.named_buffers(prefix, recurse=False)))
    return names


def blocks_of(net: nn.Module) -> list[nn.Module]:
    """Returns the modules in a model's attribute `blocks`, or an empty list if it has none or if it is not a module,
    such as a Python list in a user's model."""
    blocks = getattr(net, "blocks", None)
    return [*blocks.children()] if isinstance(blocks, nn.Module) else []


def freeze_statistics(net: nn.Module) -> None:
    """Sets the batch norms that `frozen_batch_norms` returns to evaluation mode, until `net.train()` is called. They
    then normalise with their running statistics and do not change them, like torchvision's FrozenBatchNorm2d."""
    for norm in frozen_batch_norms(net):
        norm.eval()


def tracked_batch_norms(net: nn.Module) -> list[_BatchNorm]:
    """Returns the batch norms in `net` whose running statistics training changes."""
    rest = {*frozen_batch_norms(net)}
    return [module for module in net.modules() if isinstance(module, _BatchNorm) and module not in rest]


def frozen_batch_norms(net: nn.Module) -> list[_BatchNorm]:
    """Returns the batch norms in `net` without a trained parameter, or an empty list if no parameter of the model is
    frozen, even for batch norms without parameters."""
    if all(parameter.requires_grad for parameter in net.parameters()):
        return []
    frozen: list[_BatchNorm] = []
    for module in net.modules():
        if isinstance(module, _BatchNorm) and not any(each.requires_grad for each in module.parameters()):
            frozen.append(module)
    return frozen


A, B = ".lora_a", ".lora_b"  # suffixes of the adapters' names


class LoRALinear(nn.Linear):
    """A linear layer with an adapter: x W^T + bias + alpha / rank * (dropout(x) A^T) B^T.

    A has the shape (rank, in), and is drawn as torch draws the weights of a linear layer (Kaiming-uniform with a =
    sqrt(5)), as in Microsoft's loralib and peft. B has the shape (out, rank), and starts at zero, so that before the
    first step the output is that of the given linear layer. W and the bias are the parameter objects of that layer,
    whether ZeRO 3 has sharded them or not.
    """

    def __init__(self, linear: nn.Linear, lora: LoRAConfig):
        nn.Module.__init__(self)  # not nn.Linear.__init__, which would draw weights
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scale, self.dropout = lora.alpha / lora.rank, lora.dropout
        self.lora_a = nn.Parameter(torch.empty(lora.rank, linear.in_features))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, lora.rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, input: Tensor) -> Tensor:
        inner = F.linear(F.dropout(input, self.dropout, self.training), self.lora_a)
        return F.linear(input, self.weight, self.bias) + self.scale * F.linear(inner, self.lora_b)


def adapt(net: nn.Module, lora: LoRAConfig) -> None:
    """Adds an adapter, in place, to each linear layer of `net` that can have one and that a pattern in `lora.target`
    matches. Does nothing if `lora.rank` is 0. Raises UsageError if a pattern matches no such layer."""
    if not lora.rank:
        return
    # Linear layers of a gate or of torch's attention (a subclass) cannot have an adapter. It would have no effect,
    # because only the weights of these layers are read.
    gated = {id(module.wg) for module in net.modules() if isinstance(module, Gate)}
    named = net.named_modules()
    layers = {name: layer for name, layer in named if type(layer) is nn.Linear and id(layer) not in gated}
    for pattern in lora.target:
        if not any(fnmatchcase(name, pattern) for name in layers):
            meant = nearest(pattern, layers, 3, 0.3)
            raise UsageError(f"--lora.target {pattern} names no linear layer that can have an adapter: {meant}")
    for name, layer in layers.items():
        if any(fnmatchcase(name, pattern) for pattern in lora.target):
            parent, _, child = name.rpartition(".")
            setattr(net.get_submodule(parent), child, LoRALinear(layer, lora))


def merged(weights: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Returns the weights of the plain model that computes the same scores as a model with adapters. The weight of a
    layer with an adapter becomes W + alpha / rank * B A, in float32. All other tensors stay as they are."""
    plain = {name: value for name, value in weights.items() if not name.endswith((A, B))}
    for name, b in weights.items():
        if name.endswith(B):
            layer = name.removesuffix(B)
            a, weight = weights[layer + A], f"{layer}.weight"
            plain[weight] = plain[weight].float() + alpha / len(a) * (b.float() @ a.float())
    return plain
