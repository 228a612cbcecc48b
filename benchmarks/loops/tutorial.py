"""Measures the training loop of the PyTorch tutorial "Training a Classifier", with its dataset class, loader and
optimizer.

The source is https://docs.pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html. The print every 2,000
mini-batches is left out.
"""

import json

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from benchmarks.loops import common
from benchmarks.loops.common import CIFAR10InMemory, Clock
from cifar_zero.models.net import Net

BATCH_SIZE = 4


def train(cache: str, steps: int, device: torch.device) -> dict[str, float]:
    """Trains on the images in `cache` for the warm-up and `steps` timed steps. Returns the measured figures."""
    trainset = CIFAR10InMemory(cache)
    trainloader = DataLoader(trainset, batch_size=BATCH_SIZE, shuffle=True, num_workers=2)
    net = Net().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(net.parameters(), lr=0.001, momentum=0.9)

    clock = Clock(steps, BATCH_SIZE, device)
    running_loss = 0.0
    for data in clock.over(trainloader):
        inputs, labels = data[0].to(device), data[1].to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    return clock.figures()


if __name__ == "__main__":
    options = common.parser(__doc__).parse_args()
    print(json.dumps(train(options.cache, options.steps, torch.device(options.device))))
