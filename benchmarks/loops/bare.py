"""Measures the upper limit of the hardware with a loop of plain eager PyTorch over uint8 images in the device's memory.

The images come in train.py's order, so that both train the same model. `--tuned` adds the settings that make such a
loop faster: the fused optimizer, and the threads, convolution kernels and memory format that train.py chooses.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import common
from benchmarks.loops.common import Clock
from cifar_zero import data as sources
from cifar_zero import models
from cifar_zero.config.recipe import Choice, DataConfig, Recipe
from cifar_zero.data.augment import memory_format
from cifar_zero.data.dataset import TrainOrder
from cifar_zero.training.callbacks.cpu_kernels import CPUKernels
from cifar_zero.training.callbacks.throughput import training_flops

SEED = 0  # seed of the weights and of the image order, train.py's default


def train(
    data: DataConfig, batch_size: int, steps: int, device: torch.device, tuned: bool = False, model: str = "net"
) -> tuple[nn.Module, dict[str, float]]:
    """Trains `model`, a name of --model, for the warm-up and `steps` timed steps on the source `data`. Returns the
    trained model and the measured figures. `tuned` is the option --tuned."""
    dataset = sources.load(data, data.source)
    images = torch.from_numpy(np.ascontiguousarray(dataset.train_images.transpose(0, 3, 1, 2))).to(device)
    labels = torch.from_numpy(np.array(dataset.train_labels)).to(device)
    if tuned:
        if device.type == "cpu":  # the threads and convolution kernels that train.py chooses for the batch
            kernels: Any = CPUKernels(training_flops(Recipe(model=Choice(model)), 10, batch_size), "32-true")
            kernels.on_train_start(None, None)  # the callback uses neither the trainer nor the module
        images = images.contiguous(memory_format=memory_format(device))  # batches of these images keep it

    torch.manual_seed(SEED)
    net = models.build(model, 10).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9, fused=tuned or None)
    clock = Clock(steps, batch_size, device)
    for rows in clock.over(shuffled(len(images), batch_size, device)):
        inputs = images[rows].float().div_(255).sub_(0.5).div_(0.5)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(inputs), labels[rows])
        loss.backward()
        optimizer.step()
    return net, clock.figures()


def shuffled(count: int, batch_size: int, device: torch.device) -> Iterator[Tensor]:
    """Yields the indices of the images of each batch, int64 (batch_size,), epoch after epoch."""
    order = TrainOrder(count, batch_size, accumulate=1, replicas=1, replica=0, seed=SEED)
    epoch = 0
    while True:
        order.set_epoch(epoch)
        yield from order.positions().to(device)
        epoch += 1


if __name__ == "__main__":
    parser = common.parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=4, help="images per step (default: 4)")
    tuned = "use the fused optimizer, and train.py's threads, kernels and memory format"
    parser.add_argument("--tuned", action="store_true", help=tuned)
    options = parser.parse_args()
    data, device = DataConfig(source="synthetic", cache=options.cache), torch.device(options.device)
    _, figures = train(data, options.batch_size, options.steps, device, options.tuned)
    print(json.dumps(figures))
