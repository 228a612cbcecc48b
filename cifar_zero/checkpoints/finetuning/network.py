"""The model of a run that trains parts of it, or adapters."""

from collections.abc import Sequence

import torch
from torch import nn

from cifar_zero import models
from cifar_zero.checkpoints.finetuning.freeze import freeze
from cifar_zero.checkpoints.finetuning.lora import adapt
from cifar_zero.config.flags import Choice, LoRAConfig
from cifar_zero.models.initialization import initialize

NO_LORA = LoRAConfig()


def build(
    model: Choice,
    num_classes: int,
    trainable: Sequence[str] = (),
    lora: LoRAConfig = NO_LORA,
    init: str = "default",
    seed: int = 0,
) -> nn.Module:
    """Returns the model with fresh weights (`initialization.initialize`), adapters (`lora.adapt`) and `freeze.freeze`.

    Raises:
        UsageError: a target of LoRA is no linear layer.
    """
    net = models.build(model.name, num_classes, **model.options)
    initialize(net, init, seed)
    adapt(net, lora)
    freeze(net, trainable)
    return net


def on_meta(model: Choice, num_classes: int, trainable: Sequence[str] = (), lora: LoRAConfig = NO_LORA) -> nn.Module:
    """Returns the same with shapes and without values; see `build`."""
    with torch.device("meta"):
        return build(model, num_classes, trainable, lora)
