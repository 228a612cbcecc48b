"""Counts a model's parameters and the FLOPs of a training step, on a copy with shapes and no values (torch's meta
device), so that it does not matter whether the strategy shards, casts or offloads the model."""

from collections.abc import Sequence

import torch
from lightning.fabric.utilities.throughput import measure_flops

from cifar_zero.checkpoints.finetuning.network import NO_LORA, on_meta
from cifar_zero.config.flags import Choice, LoRAConfig
from cifar_zero.models import IMAGE_SHAPE
from cifar_zero.models.recomputation import checkpoint_blocks


def parameter_count(model: Choice, num_classes: int, lora: LoRAConfig = NO_LORA) -> int:
    """Returns the parameters of the model and its adapters, in elements."""
    return sum(parameter.numel() for parameter in on_meta(model, num_classes, lora=lora).parameters())


def trained_count(model: Choice, num_classes: int, trainable: Sequence[str], lora: LoRAConfig) -> int:
    """Returns those that are not frozen; see `finetuning.network.build`."""
    net = on_meta(model, num_classes, trainable, lora)
    return sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)


def training_flops(
    model: Choice,
    num_classes: int,
    batch_size: int,
    trainable: Sequence[str] = (),
    lora: LoRAConfig = NO_LORA,
    activation_checkpointing: bool = False,
) -> int:
    """Returns the FLOPs of one forward and backward pass of `batch_size` images, two for each multiply-add.

    Counts matrix products and convolutions, as torch's FlopCounterMode does. The backward pass ends where nothing
    before is trained. With `activation_checkpointing` the recomputation is included.

    Raises:
        UsageError: activation checkpointing of a model without blocks.
    """
    net = on_meta(model, num_classes, trainable, lora)
    with torch.device("meta"):
        if activation_checkpointing:
            checkpoint_blocks(net)
        images = torch.empty(batch_size, *IMAGE_SHAPE)
    with torch.autograd.set_detect_anomaly(False):  # it would check values, which do not exist
        return measure_flops(net, lambda: net(images), torch.Tensor.sum)
