"""The course's models compared with torchvision's, at any image size, and their options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision

from cifar_zero import models
from cifar_zero.config.recipe import Choice
from cifar_zero.training.callbacks.throughput import training_flops

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": [8], "dropout": 0.5, "batch_norm": True},
    "vgg16": {"width": 0.01, "dropout": 0.5},
    "resnet18": {"width": 0.02},
    "resnet50": {"width": 0.02},
    "vit_tiny": {"dropout": 0.5},
}


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_resnets_are_torchvisions_but_for_the_stem(name: str):
    torch.manual_seed(0)
    net, expected = models.build(name, 3), torchvision.models.get_model(name, num_classes=3)
    expected.conv1, expected.maxpool = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False), torch.nn.Identity()
    expected.load_state_dict(net.state_dict())
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(net(images), expected(images))


def test_vgg_is_torchvisions():
    """Names, shapes, and at another width the scores."""
    with torch.device("meta"):
        ours, theirs = models.build("vgg16", 10), torchvision.models.vgg16_bn(num_classes=10)
    shapes, expected_shapes = ([(name, p.shape) for name, p in net.named_parameters()] for net in (ours, theirs))
    assert shapes == expected_shapes
    torch.manual_seed(0)
    net: Any = models.build("vgg16", 3, width=1 / 16).eval()
    expected: Any = torchvision.models.VGG(net.features, num_classes=3, init_weights=False).eval()
    expected.classifier = net.classifier
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(net(images), expected(images))


@pytest.mark.parametrize("name", ["vgg16", "resnet18", "resnet50"])
def test_any_size_of_images(name: str):
    net = models.build(name, 7, **SMALL[name])
    assert net(torch.zeros(2, 3, 40, 40)).shape == (2, 7)


def test_perceptron_without_hidden_layers_is_softmax_regression():
    torch.manual_seed(0)
    net: Any = models.build("mlp", 10, hidden=[])
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(net(images), images.flatten(1) @ net[-1].weight.T + net[-1].bias)


@pytest.mark.parametrize(
    ("activation", "function"),
    [("relu", torch.relu), ("tanh", torch.tanh), ("sigmoid", torch.sigmoid), ("gelu", torch.nn.functional.gelu)],
)
def test_perceptron_has_the_activation_between_its_layers(activation: str, function: Any):
    torch.manual_seed(0)
    net: Any = models.build("mlp", 4, hidden=[6], activation=activation)
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(net(images), net[-1](function(net[1](images.flatten(1)))))


@pytest.mark.parametrize("name", ["mlp", "vgg16", "vit_tiny"])
def test_dropout_is_random_in_training_and_off_in_evaluation(name: str):
    torch.manual_seed(0)
    net, images = models.build(name, 10, **SMALL[name]), torch.randn(4, 3, 32, 32)
    assert not torch.equal(net(images), net(images))
    net.eval()
    assert torch.equal(net(images), net(images))


def test_flops_of_the_resnet():
    """The forward pass takes 0.56 billion multiply-adds for an image of 32 x 32 (github.com/kuangliu/pytorch-cifar has
    this model). The backward pass takes twice as many, less the gradient of the images."""
    flops = training_flops(Choice("resnet18"), 10, 1)
    assert flops == pytest.approx(2 * 3 * 0.5556e9, rel=2e-3)
    assert training_flops(Choice("resnet18"), 10, 2) == 2 * flops
