"""Residual networks (He et al. 2016, ImageNet's table 1) in the form for images of 32 x 32 pixels.

The first layer is one convolution of 3 x 3 without stride, and no max-pooling follows, as in the paper's own networks
for CIFAR (section 4.2): a stem for 224 pixels would leave feature maps of a single one. All other layers and all names
are those of torchvision, whose bottleneck has its stride in the 3 x 3 convolution.
"""

from __future__ import annotations

from torch import Tensor, nn

from cifar_zero.models.width import scaled

CHANNELS = (64, 128, 256, 512)
"""Of the four stages, inside their blocks; each but the first halves the resolution."""


class ResNet(nn.Module):
    """Stem -> four stages of residual blocks -> mean over the positions -> class scores.

    Args:
        depth: key of DEPTHS.
        num_classes: width of the output.
        width: of all hidden layers, as a multiple of the paper's.
    """

    def __init__(self, depth: int, num_classes: int, width: float):
        super().__init__()
        block, blocks = DEPTHS[depth]
        channels = [scaled(number, width) for number in CHANNELS]
        self.conv1 = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(block, channels[0], channels[0], blocks[0], stride=1)
        self.layer2 = _stage(block, channels[0] * block.expansion, channels[1], blocks[1], stride=2)
        self.layer3 = _stage(block, channels[1] * block.expansion, channels[2], blocks[2], stride=2)
        self.layer4 = _stage(block, channels[2] * block.expansion, channels[3], blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels[3] * block.expansion, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (N, num_classes) of images (N, 3, H, W) in [-1, 1]."""
        x = self.relu(self.bn1(self.conv1(x)))  # (N, 64, H, W)
        x = self.layer1(x)  # (N, 64, H, W); of bottlenecks four times the channels, here and below
        x = self.layer2(x)  # (N, 128, H/2, W/2)
        x = self.layer3(x)  # (N, 256, H/4, W/4)
        x = self.layer4(x)  # (N, 512, H/8, W/8)
        return self.fc(self.avgpool(x).flatten(1))  # (N, 512) -> (N, num_classes)


class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut."""

    expansion = 1
    """Channels of the output, as a multiple of those inside."""

    def __init__(self, before: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _shortcut(before, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps (N, before, H, W) -> (N, channels, H/stride, W/stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """Three convolutions, 1 x 1 to fewer channels, 3 x 3, and 1 x 1 to more, beside a shortcut."""

    expansion = 4
    """Channels of the output, as a multiple of those inside."""

    def __init__(self, before: int, channels: int, stride: int):
        super().__init__()
        after = channels * self.expansion
        self.conv1 = nn.Conv2d(before, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps (N, before, H, W) -> (N, 4 x channels, H/stride, W/stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.downsample(x))


DEPTHS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
}
"""Kind of the blocks and their number in each stage, by the layers with weights."""


def _stage(
    block: type[BasicBlock] | type[Bottleneck], before: int, channels: int, blocks: int, stride: int
) -> nn.Sequential:
    rest = (block(channels * block.expansion, channels, stride=1) for _ in range(blocks - 1))
    return nn.Sequential(block(before, channels, stride), *rest)


def _shortcut(before: int, after: int, stride: int) -> nn.Module:
    """The identity, or a convolution of 1 x 1 where the shape changes (the paper's option B)."""
    if stride == 1 and before == after:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
