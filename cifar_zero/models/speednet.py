"""The small network of the CIFAR-10 speed records: VGG-like, behind a first layer that whitens patches of the images.

After Keller Jordan's airbench94 (Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv 2404.00498;
github.com/KellerJordan/cifar10-airbench, airbench94_muon.py), whose constants these are.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_zero.models.width import scaled

PATCH = 2
"""Side in pixels of the patches that the first layer whitens."""

WHITENED = 2 * 3 * PATCH**2
"""Channels behind it: each principal direction of a patch of 3 colours, and its negative."""

CHANNELS = (64, 256, 256)
"""Of the three blocks, at width 1."""

SCORE_SCALE = 16
"""Scores are divided by this and the root of the number of channels: by 256 at the reference's 256 channels, where its
learning rates are from. So they serve at every width: a step of the head changes the scores by as much at each."""

NORM_EPS = 1e-12
"""Added to the variance by each batch norm."""

WHITENING_EPS = 5e-4
"""Added to the variance of each principal direction, as a share of the mean variance: the last ones are noise, which is
not to be blown up. The reference adds it to patches that have variance 1; as a share it is the same for ours."""


class SpeedNet(nn.Module):
    """A whitening convolution, three blocks of two convolutions each, and a linear layer without bias.

    Args:
        num_classes: width of the output.
        width: of the blocks, as a multiple of the reference's.
        whitening: whether the first layer's weights are those of `starting_weights`, and stay so.
        identity_init: whether each convolution passes its input through at first, as far as it has channels for it.
        norm_momentum: weight of the newest micro-batch in the batch norms' running statistics.
    """

    def __init__(self, num_classes: int, width: float, whitening: bool, identity_init: bool, norm_momentum: float):
        super().__init__()
        self.whitening = whitening
        self.whiten = nn.Conv2d(3, WHITENED, PATCH)
        self.whiten.weight.requires_grad_(not whitening)
        sizes = [WHITENED, *(scaled(channels, width) for channels in CHANNELS)]
        conv = IdentityConv if identity_init else nn.Conv2d
        self.blocks = nn.Sequential(*(Block(before, after, conv, norm_momentum) for before, after in pairwise(sizes)))
        self.head = Head(sizes[-1], num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (N, num_classes) of images (N, 3, H, W) in [-1, 1], H and W from 12; here of 32 x 32 pixels."""
        x = F.gelu(self.whiten(x))  # (N, 24, 31, 31)
        x = self.blocks(x)  # (N, 256, 3, 3)
        x = F.max_pool2d(x, (x.shape[2], x.shape[3])).flatten(1)  # (N, 256)
        return self.head(x) / (SCORE_SCALE * x.shape[1] ** 0.5)

    def starting_weights(self, images: Tensor) -> dict[str, Tensor]:
        """What is computed from training images (N, 3, 32, 32) in [-1, 1] before the first step, by name."""
        return {"whiten.weight": whitening_filters(images)} if self.whitening else {}


class Block(nn.Module):
    """Two convolutions of 3 x 3, each with a batch norm and a GELU; the first one's output is pooled to half the side.

    Args:
        before: channels of the input.
        after: channels of the output.
        conv: the class of the convolutions.
        norm_momentum: see `SpeedNet`.
    """

    def __init__(self, before: int, after: int, conv: type[nn.Conv2d], norm_momentum: float):
        super().__init__()
        self.conv1 = conv(before, after, 3, padding=1, bias=False)
        self.norm1 = norm(after, norm_momentum)
        self.conv2 = conv(after, after, 3, padding=1, bias=False)
        self.norm2 = norm(after, norm_momentum)

    def forward(self, x: Tensor) -> Tensor:
        """(N, before, H, W) -> (N, after, H // 2, W // 2)."""
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class IdentityConv(nn.Conv2d):
    """A convolution whose first filters each pass one channel of the input through (Dirac); the others are torch's."""

    def reset_parameters(self) -> None:
        """Draws the weights. Called by the constructor, while ZeRO-3 still has them whole."""
        super().reset_parameters()
        nn.init.dirac_(self.weight.detach()[: self.in_channels])


class Head(nn.Linear):
    """A linear layer whose weights have variance 1."""

    def reset_parameters(self) -> None:
        """Draws the weights. Called by the constructor, while ZeRO-3 still has them whole."""
        super().reset_parameters()
        with torch.no_grad():
            self.weight.div_(self.weight.std())


def norm(channels: int, momentum: float) -> nn.BatchNorm2d:
    """A batch norm that learns a bias and no scale."""
    made = nn.BatchNorm2d(channels, eps=NORM_EPS, momentum=momentum)
    made.weight.requires_grad_(False)
    return made


def whitening_filters(images: Tensor) -> Tensor:
    """The principal directions of the images' patches, each divided by its standard deviation, and their negatives.

    A convolution with them gives patches whose covariance is the identity, up to `WHITENING_EPS` and about 0: the mean
    is not taken away, as in the reference.

    Args:
        images: float (N, 3, H, W); all of their patches count.

    Returns:
        float32 (WHITENED, 3, PATCH, PATCH).
    """
    patches = F.unfold(images, PATCH)  # (N, 12, patches of an image), colour by colour as a filter has them
    covariance = (patches @ patches.mT).mean(0).double().cpu() / patches.shape[2]
    variances, directions = torch.linalg.eigh(covariance)  # directions in columns
    # Either sign would do; this one is the same whatever the library.
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    directions = directions * largest.sign() / (variances + WHITENING_EPS * variances.mean()).sqrt()
    filters = directions.T.reshape(-1, 3, PATCH, PATCH).float()
    return torch.cat([filters, -filters])
