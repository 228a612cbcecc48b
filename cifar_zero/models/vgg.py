"""Defines VGG-16 (Simonyan and Zisserman 2015, configuration D) with batch normalisation. The layers and their names
are those of torchvision's vgg16_bn, so at width 1 each model's weights fit the other."""

from torch import Tensor, nn
from torchvision.models.vgg import cfgs, make_layers

from cifar_zero import models

POOLED_SIDE = 7
"""Side in pixels of the pooled feature map, whatever the size of the images. Images of 224 x 224 pixels have this side
without pooling."""

HIDDEN = 4096  # neurons of each of the two hidden linear layers


class VGG16(nn.Module):
    """13 convolutions of 3 x 3 in five stages, each of which halves the resolution, and three linear layers."""

    def __init__(self, num_classes: int, options: models.VGG16):
        super().__init__()
        stages = [layer if isinstance(layer, str) else options.scaled(layer) for layer in cfgs["D"]]
        self.features = make_layers(stages, batch_norm=True)
        self.avgpool = nn.AdaptiveAvgPool2d(POOLED_SIDE)
        hidden = options.scaled(HIDDEN)
        self.classifier = nn.Sequential(
            nn.Linear(options.scaled(512) * POOLED_SIDE**2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(options.dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(options.dropout),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns class scores (N, num_classes) for images (N, 3, H, W) in [-1, 1], with H and W at least 32."""
        x = self.features(x)  # (N, 512, H/32, W/32), one position for 32 x 32 pixels
        x = self.avgpool(x)  # (N, 512, 7, 7)
        return self.classifier(x.flatten(1))  # (N, 25088) -> (N, num_classes)
