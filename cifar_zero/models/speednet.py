"""Defines the small model of the CIFAR-10 speed records. Its first layer whitens patches of the images, and VGG-like
layers follow.

The model and its constants follow Keller Jordan's airbench94 (Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single
GPU", arXiv 2404.00498; github.com/KellerJordan/cifar10-airbench, airbench94_muon.py).
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_zero import models

PATCH = 2  # side in pixels of the patches that the first layer whitens
WHITENED = 2 * 3 * PATCH**2  # that layer's channels: each principal direction of a patch of 3 colours, and its negative
CHANNELS = (64, 256, 256)  # output channels of the three blocks, at width 1

SCORE_SCALE = 16
"""Scores are divided by this number times the square root of the number of channels, that is by 256 for the reference's
256 channels. A step of the head then changes the scores by the same amount at every width, so the reference's learning
rates fit."""

NORM_MOMENTUM = 0.4
"""Weight of the newest micro-batch in the running statistics of batch norms (torch's default is 0.1). In a run of 200
steps, older statistics come from outdated weights."""

WHITENING_EPS = 5e-4
"""Share of the mean variance that is added to the variance of each principal direction, because the last directions are
noise and must not be amplified. The reference adds this number itself, which is the same, because its patches have
variance 1."""


class SpeedNet(nn.Module):
    """A whitening convolution, three blocks of two convolutions, and a linear layer without bias."""

    def __init__(self, num_classes: int, options: models.SpeedNet):
        super().__init__()
        self.whiten = nn.Conv2d(3, WHITENED, PATCH)
        self.whiten.weight.requires_grad_(False)
        sizes = [WHITENED, *(options.scaled(channels) for channels in CHANNELS)]
        self.blocks = nn.Sequential(*(Block(before, after) for before, after in pairwise(sizes)))
        self.head = Head(sizes[-1], num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns class scores (N, num_classes) for images (N, 3, H, W) in [-1, 1]. The shapes below are for 32 x 32
        pixels."""
        x = F.gelu(self.whiten(x))  # (N, 24, 31, 31)
        x = self.blocks(x)  # (N, 256, 3, 3)
        x = F.max_pool2d(x, (x.shape[2], x.shape[3])).flatten(1)  # (N, 256)
        return self.head(x) / (SCORE_SCALE * x.shape[1] ** 0.5)

    def starting_weights(self, images: Tensor) -> dict[str, Tensor]:
        """Returns the initial weights that are computed from training images (N, 3, 32, 32) in [-1, 1], keyed by
        parameter name."""
        return {"whiten.weight": whitening_filters(images)}


class Block(nn.Module):
    """Two 3 x 3 convolutions, each with a batch norm and GELU. Max-pooling after the first convolution halves the
    side."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.conv1 = IdentityConv(before, after, 3, padding=1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = IdentityConv(after, after, 3, padding=1, bias=False)
        self.norm2 = norm(after)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, before, H, W) to (N, after, H // 2, W // 2)."""
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class IdentityConv(nn.Conv2d):
    """A convolution whose first filters each copy one channel of the input (Dirac initialisation). The other filters
    are initialised by torch."""

    def reset_parameters(self) -> None:  # called by the constructor, before ZeRO 3 shards the weights
        super().reset_parameters()
        nn.init.dirac_(self.weight.detach()[: self.in_channels])


class Head(nn.Linear):
    """A linear layer whose initial weights have variance 1."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight.div_(self.weight.std())


def norm(channels: int) -> nn.BatchNorm2d:
    """Returns a batch norm that learns a bias but no scale."""
    made = nn.BatchNorm2d(channels, eps=1e-12, momentum=NORM_MOMENTUM)
    made.weight.requires_grad_(False)
    return made


def whitening_filters(images: Tensor) -> Tensor:
    """Returns filters float32 (WHITENED, 3, PATCH, PATCH) that whiten the patches of images, float (N, 3, H, W).

    The first half of the filters are the principal directions of the patches, divided by their standard deviations, and
    the second half are their negatives. A convolution with the first half gives patches whose second moments are the
    identity, up to `WHITENING_EPS`. The mean is not subtracted, as in the reference.
    """
    patches = F.unfold(images, PATCH)  # (N, 12, patches of an image), colour by colour as in a filter
    covariance = (patches @ patches.mT).mean(0).double().cpu() / patches.shape[2]
    variances, directions = torch.linalg.eigh(covariance)  # directions in columns
    # Either sign is valid; this choice is the same in every linear algebra library.
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    directions = directions * largest.sign() / (variances + WHITENING_EPS * variances.mean()).sqrt()
    filters = directions.T.reshape(-1, 3, PATCH, PATCH).float()
    return torch.cat([filters, -filters])
