"""VGG-16 (Simonyan and Zisserman 2015, configuration D) with batch normalisation.

Layers and their names are those of torchvision's vgg16_bn: at width 1 the weights of one fit the other.
"""

from __future__ import annotations

from torch import Tensor, nn

from cifar_zero.models import scaled

CONFIGURATION_D = ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3)
"""Channels of the 13 convolutions in their five stages, each of which halves the resolution at its end."""

POOLED_SIDE = 7
"""Side in pixels of the pooled feature map, whatever the images' size: that of images of 224 x 224 pixels."""

HIDDEN = 4096
"""Neurons of each of the two hidden linear layers."""


class VGG16(nn.Module):
    """13 convolutions of 3 x 3 in five stages, and three linear layers.

    Args:
        num_classes: width of the output.
        width: of all hidden layers, as a multiple of the paper's.
        dropout: share of the hidden linear layers' outputs that is dropped in training.
    """

    def __init__(self, num_classes: int, width: float, dropout: float):
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in CONFIGURATION_D:
            for number in stage:
                before, channels = channels, scaled(number, width)
                layers += [nn.Conv2d(before, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(POOLED_SIDE)
        hidden = scaled(HIDDEN, width)
        self.classifier = nn.Sequential(
            nn.Linear(channels * POOLED_SIDE**2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (N, num_classes) of images (N, 3, H, W) in [-1, 1], H and W at least 32."""
        x = self.features(x)  # (N, 512, H/32, W/32): of 32 x 32 pixels one position
        x = self.avgpool(x)  # (N, 512, 7, 7)
        return self.classifier(x.flatten(1))  # (N, 25088) -> (N, num_classes)
