"""Defines a small model built from patterns that have broken strategies. Each pattern cites the DeepSpeed issues that
report it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_zero import models

WIDTH = 37
"""Number of features of the hidden layers. It is prime, so that every strategy has to pad its shards."""


FAINT = 1e-3
"""Weight of the scores of the layer `faint`."""


class EdgeCases(nn.Module):
    """Maps images (N, 3, 32, 32) to class scores, with 12 thousand parameters.

    With the option `unused`, every fourth micro-batch in training gives a branch no gradient. At least one other
    micro-batch of the same step must give the branch a gradient. Otherwise strategies would disagree: torch's
    optimizers skip a parameter without a gradient, but ZeRO updates it as if its gradient were zero.
    """

    def __init__(self, num_classes: int, options: models.EdgeCases):
        super().__init__()
        # Frozen weights are in no partition (DeepSpeed issue 4055).
        self.stem = nn.Conv2d(3, 7, 3, stride=2, padding=1).requires_grad_(False)
        # The gradient of a bias before batch normalisation is nothing but rounding error.
        self.conv = nn.Conv2d(7, 11, 3, stride=2, padding=1)
        self.conv_norm = nn.BatchNorm2d(11)
        # This tensor has half of all elements, and every partition into ranks cuts it in the middle.
        self.project = nn.Linear(11 * 4 * 4, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        # This layer is used twice in a forward pass, so that one hook gets two gradients (DeepSpeed issues 8224 and
        # 8245).
        self.twice = nn.Linear(WIDTH, WIDTH)
        # Tied weights are one tensor with two names (DeepSpeed issues 966 and 3824).
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        # The branch has no gradient in some micro-batches (DeepSpeed issues 545 and 1266).
        self.branch = nn.Linear(WIDTH, WIDTH)
        # The scale has one element in one dimension. FSDP2 (torch 2.15) refuses a tensor without dimensions, and
        # DeepSpeed (0.19.8) fails at the start with one.
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, num_classes)
        # The gradient is a thousandth of the other gradients, as of a head whose loss has a small weight. Were it lost,
        # the norm of the whole gradient would not show it.
        self.faint = nn.Linear(WIDTH, num_classes)
        self._unused = options.unused
        self._passes = 0

    def forward(self, images: Tensor) -> Tensor:
        """Returns class scores (N, classes)."""
        features = F.relu(self.conv_norm(self.conv(self.stem(images))))
        hidden = self.project(F.avg_pool2d(features, 2).flatten(1))
        for layer in (self.twice, self.first, self.twice, self.second):
            hidden = hidden + layer(F.relu(self.norm(hidden)))
        if self.training:
            self._passes += 1
        if not (self._unused and self.training and self._passes % 4 == 2):  # every fourth pass
            hidden = hidden + self.branch(F.relu(hidden))
        return self.head(self.scale * hidden) + FAINT * self.faint(hidden)
