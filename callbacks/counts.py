"""What a network costs on paper, counted rather than guessed: its parameters and the FLOPs of a training step.

Counted on a copy of the network that has shapes and no values (torch's meta device), so that no strategy which shards,
casts or offloads the real one is in the way.
"""

from __future__ import annotations

import torch
from lightning.fabric.utilities.throughput import measure_flops

import models
from config import Choice
from models.recomputation import checkpoint_blocks
from sources.dataset import IMAGE_SHAPE


def parameter_count(model: Choice, num_classes: int) -> int:
    """Parameters of the network, in elements."""
    with torch.device("meta"):
        net = models.build(model.name, num_classes, **model.options)
    return sum(parameter.numel() for parameter in net.parameters())


def training_flops(model: Choice, num_classes: int, batch_size: int, activation_checkpointing: bool = False) -> int:
    """FLOPs of one forward and one backward of `batch_size` images, a multiply-add being two.

    Matrix products and convolutions are counted, as torch's FlopCounterMode does; with `activation_checkpointing` what
    the backward pass computes again is in them.

    Raises:
        UsageError: activation checkpointing of a network without blocks.
    """
    with torch.device("meta"):
        net = models.build(model.name, num_classes, **model.options)
        if activation_checkpointing:
            checkpoint_blocks(net)
        images = torch.empty(batch_size, *IMAGE_SHAPE)
    with torch.autograd.set_detect_anomaly(False):  # it would look at values, and there are none
        return measure_flops(net, lambda: net(images), torch.Tensor.sum)
