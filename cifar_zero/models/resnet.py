"""Builds residual networks (He et al. 2016, ImageNet's table 1) for images of 32 x 32 pixels, from torchvision's
blocks.

The first layer is a 3 x 3 convolution without stride, and no max-pooling follows, as in the paper's own networks for
CIFAR (section 4.2). A stem for 224 pixels would leave feature maps of one pixel. All other layers and all names are
torchvision's. Its bottleneck block has the stride in the 3 x 3 convolution.
"""

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from cifar_zero import models

CHANNELS = (64, 128, 256, 512)
"""Number of channels inside the blocks of each of the four stages. Each stage but the first halves the resolution."""

DEPTHS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
}
"""Type of the blocks, and number of blocks in each stage, keyed by the network's number of layers with weights."""


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, a mean over the positions, and a linear layer."""

    def __init__(self, num_classes: int, options: models.ResNet):
        super().__init__()
        block, blocks = DEPTHS[options.depth]
        channels = [options.scaled(number) for number in CHANNELS]
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
        """Returns class scores (N, num_classes) for images (N, 3, H, W) in [-1, 1]."""
        x = self.relu(self.bn1(self.conv1(x)))  # (N, 64, H, W)
        x = self.layer1(x)  # (N, 64, H, W); bottlenecks have four times the channels, here and below
        x = self.layer2(x)  # (N, 128, H/2, W/2)
        x = self.layer3(x)  # (N, 256, H/4, W/4)
        x = self.layer4(x)  # (N, 512, H/8, W/8)
        return self.fc(self.avgpool(x).flatten(1))  # (N, 512) -> (N, num_classes)


def _stage(
    block: type[BasicBlock] | type[Bottleneck], before: int, channels: int, blocks: int, stride: int
) -> nn.Sequential:
    """Returns a stage that maps (N, before, H, W) to (N, channels x expansion, H/stride, W/stride). Its first block has
    the stride."""
    after = channels * block.expansion
    first = block(before, channels, stride)
    if stride != 1 or before != after:  # a convolution of 1 x 1 as the shortcut (the paper's option B)
        first.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
    return nn.Sequential(first, *(block(after, channels) for _ in range(blocks - 1)))
