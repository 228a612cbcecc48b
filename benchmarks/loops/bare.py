"""The limit of what the hardware gives: plain eager PyTorch over uint8 images that lie on the device, and nothing else.

The images come in the order that train.py gives them, so that both train the same. `--tuned` adds what makes
such a loop faster: the fused optimizer, and the threads, convolution kernels and memory format that train.py chooses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loops import arguments
from benchmarks.loops.clock import Clock
from cifar_zero import data as sources
from cifar_zero.config.flags import DataConfig
from cifar_zero.data.augment import memory_format
from cifar_zero.data.order import TrainOrder
from cifar_zero.models.net import Net

SEED = 0
"""Of the weights and the order: train.py's default."""


def train(
    data: DataConfig, batch_size: int, steps: int, device: torch.device, tuned: bool = False
) -> tuple[Net, dict[str, float]]:
    """Trains for the warm-up and `steps` timed steps of `batch_size` images each.

    Returns:
        The network, and the clock's figures with the mean loss of all steps.
    """
    dataset = sources.load(data, data.source)
    images = torch.from_numpy(np.ascontiguousarray(dataset.train_images)).to(device)
    labels = torch.from_numpy(np.array(dataset.train_labels)).to(device)
    if tuned:
        if device.type == "cpu":
            suit_kernels(batch_size)
        images = images.contiguous(memory_format=memory_format(device))  # batches cut from them keep it

    torch.manual_seed(SEED)
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9, fused=tuned)
    clock = Clock(steps, batch_size, device)
    loss_sum = torch.zeros((), device=device)
    for rows in clock.over(shuffled(len(images), batch_size, device)):
        inputs = images[rows].float().div_(255).sub_(0.5).div_(0.5)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(inputs), labels[rows])
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()
    return net, {**clock.figures(), "loss": loss_sum.item() / clock.steps}


def shuffled(count: int, batch_size: int, device: torch.device) -> Iterator[Tensor]:
    """Rows of the images of each batch (batch_size,), epoch after epoch."""
    order = TrainOrder(count, batch_size, accumulate=1, world_size=1, rank=0, seed=SEED)
    epoch = 0
    while True:
        order.set_epoch(epoch)
        yield from order.positions().to(device)
        epoch += 1


def suit_kernels(batch_size: int) -> None:
    """The threads and convolution kernels that train.py chooses for a batch."""
    from cifar_zero.config.flags import Choice
    from cifar_zero.training.callbacks.counts import training_flops  # here, as they import Lightning
    from cifar_zero.training.callbacks.cpu_kernels import CPUKernels

    kernels: Any = CPUKernels(training_flops(Choice("net"), 10, batch_size), "32-true")
    kernels.on_train_start(None, None)  # it looks at neither the trainer nor the module


if __name__ == "__main__":
    parser = arguments.parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=4, help="images per step (default: 4)")
    parser.add_argument("--tuned", action="store_true", help="with the settings that make it faster")
    options = parser.parse_args()
    data, device = arguments.data_config(options.cache), torch.device(options.device)
    _, figures = train(data, options.batch_size, options.steps, device, options.tuned)
    print(json.dumps(figures))
