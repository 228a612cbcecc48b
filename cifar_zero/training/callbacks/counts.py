"""What a network costs on paper, counted rather than guessed: its parameters and the FLOPs of a training step.

Counted on a copy of the network that has shapes and no values (torch's meta device), so that no strategy which shards,
casts or offloads the real one is in the way.
"""

from collections.abc import Sequence

import torch
from lightning.fabric.utilities.throughput import measure_flops

from cifar_zero.checkpoints.finetuning.network import NO_LORA, on_meta
from cifar_zero.config.flags import Choice, LoRAConfig
from cifar_zero.models import IMAGE_SHAPE
from cifar_zero.models.recomputation import checkpoint_blocks


def parameter_count(model: Choice, num_classes: int, lora: LoRAConfig = NO_LORA) -> int:
    """Parameters of the network and its adapters, in elements."""
    return sum(parameter.numel() for parameter in on_meta(model, num_classes, lora=lora).parameters())


def trained_count(model: Choice, num_classes: int, trainable: Sequence[str], lora: LoRAConfig) -> int:
    """Those of them that are not frozen; see `finetuning.network.build`."""
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
    """FLOPs of one forward and one backward of `batch_size` images, a multiply-add being two.

    The backward of what is frozen ends where nothing before it is trained. Matrix products and convolutions are
    counted, as torch's FlopCounterMode does; with `activation_checkpointing` what the backward pass computes again is
    in them.

    Raises:
        UsageError: activation checkpointing of a network without blocks.
    """
    net = on_meta(model, num_classes, trainable, lora)
    with torch.device("meta"):
        if activation_checkpointing:
            checkpoint_blocks(net)
        images = torch.empty(batch_size, *IMAGE_SHAPE)
    with torch.autograd.set_detect_anomaly(False):  # it would look at values, and there are none
        return measure_flops(net, lambda: net(images), torch.Tensor.sum)
