"""Compares the course's models with torchvision's models, at any image size, and tests their options."""

from typing import Any

import pytest
import torch
import torchvision

from cifar_zero import models


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_resnets_are_torchvisions_but_for_the_stem(name: str):
    torch.manual_seed(0)
    net, expected = models.build(name, 3), torchvision.models.get_model(name, num_classes=3)
    expected.conv1, expected.maxpool = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False), torch.nn.Identity()
    expected.load_state_dict(net.state_dict())
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(net(images), expected(images))


def test_vgg_is_torchvisions():
    """Names and shapes are equal at width 1, and scores are equal at another width."""
    with torch.device("meta"):
        ours, reference = models.build("vgg16", 10), torchvision.models.vgg16_bn(num_classes=10)
    reference.load_state_dict(ours.state_dict(), assign=True)
    torch.manual_seed(0)
    net: Any = models.build("vgg16", 3, width=1 / 16).eval()
    expected: Any = torchvision.models.VGG(net.features, num_classes=3, init_weights=False).eval()
    expected.classifier = net.classifier
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(net(images), expected(images))
