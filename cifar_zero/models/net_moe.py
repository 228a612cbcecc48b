"""The tutorial's network with mixtures of experts, as DeepSpeedExamples' CIFAR-10 program builds it."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from cifar_zero.models.mixture_options import MixtureOptions
from cifar_zero.models.moe import MixtureOfExperts
from cifar_zero.models.net import Net

WIDTH = 84
"""Of the tokens, each one image."""


class NetMoE(Net):
    """Net whose last layer is a row of mixtures, 84 -> 84, and a linear layer.

    Args:
        num_classes: width of the output.
        options: of the mixtures.
    """

    def __init__(self, num_classes: int, options: MixtureOptions):
        super().__init__(num_classes)
        del self.fc3
        expert = partial(nn.Linear, WIDTH, WIDTH)
        self.fc3 = nn.Sequential(*(MixtureOfExperts(WIDTH, number, expert, options) for number in options.num_experts))
        self.fc4 = nn.Linear(WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (N, num_classes) of images (N, 3, 32, 32) in [-1, 1]."""
        return self.fc4(super().forward(x))
