"""The course's models compared with torchvision's, at any image size, and their options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision

from cifar_zero import models
from cifar_zero.config import command_line
from cifar_zero.config.recipe import Choice
from cifar_zero.core.errors import UsageError
from cifar_zero.training.callbacks.throughput import training_flops
from tests.support.helpers import parameter_count

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": [8], "dropout": 0.5, "batch_norm": True},
    "vgg16": {"width": 0.01, "dropout": 0.5},
    "resnet18": {"width": 0.02},
    "resnet50": {"width": 0.02},
    "vit_tiny": {"dropout": 0.5},
}


def shapes(net: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("vgg16", "vgg16_bn"), ("resnet18", "resnet18"), ("resnet34", "resnet34"), ("resnet50", "resnet50")],
)
def test_names_and_shapes_are_torchvisions(name: str, theirs: str):
    """All but the first convolution of a ResNet, which is 3 x 3 here and 7 x 7 in torchvision."""
    with torch.device("meta"):
        ours, expected = shapes(models.build(name, 10)), shapes(torchvision.models.get_model(theirs, num_classes=10))
    if name != "vgg16":
        assert ours.pop("conv1.weight") == (64, 3, 3, 3)
        assert expected.pop("conv1.weight") == (64, 3, 7, 7)
    assert list(ours.items()) == list(expected.items())


@pytest.mark.parametrize(("name", "theirs"), [("resnet18", "resnet18"), ("resnet50", "resnet50")])
def test_resnets_compute_what_torchvisions_do(name: str, theirs: str):
    """torchvision's model gets our stem."""
    torch.manual_seed(0)
    net, expected = models.build(name, 3), torchvision.models.get_model(theirs, num_classes=3)
    expected.conv1, expected.maxpool = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False), torch.nn.Identity()
    expected.load_state_dict(net.state_dict())
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(net(images), expected(images))


def test_vgg_computes_what_torchvisions_does():
    torch.manual_seed(0)
    net: Any = models.build("vgg16", 3, width=1 / 16).eval()
    expected: Any = torchvision.models.VGG(net.features, num_classes=3, init_weights=False).eval()
    expected.classifier = net.classifier
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(net(images), expected(images))


@pytest.mark.parametrize("name", ["vgg16", "resnet18", "resnet50"])
@pytest.mark.parametrize("side", [32, 40, 96])
def test_any_size_of_images(name: str, side: int):
    net = models.build(name, 7, **SMALL[name])
    assert net(torch.zeros(2, 3, side, side)).shape == (2, 7)


def test_perceptron_without_hidden_layers_is_softmax_regression():
    torch.manual_seed(0)
    net: Any = models.build("mlp", 10, hidden=[])
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(net(images), images.flatten(1) @ net[-1].weight.T + net[-1].bias)
    assert parameter_count(Choice("mlp", {"hidden": []}), 10) == 3072 * 10 + 10


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


@pytest.mark.parametrize("name", ["mlp", "vgg16", "resnet18"])
def test_counts_without_values(name: str):
    net = models.build(name, 10, **SMALL[name])
    choice = Choice(name, SMALL[name])
    assert parameter_count(choice, 10) == sum(parameter.numel() for parameter in net.parameters())
    assert training_flops(choice, 10, 4) == 2 * training_flops(choice, 10, 2) > 0


def test_flops_of_the_resnet():
    """The forward pass takes 0.56 billion multiply-adds for an image of 32 x 32 (github.com/kuangliu/pytorch-cifar has
    this model). The backward pass takes twice as many, less the gradient of the images."""
    flops = training_flops(Choice("resnet18"), 10, 1)
    assert flops == pytest.approx(2 * 3 * 0.5556e9, rel=2e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("mlp --model.hidden [0]", "--model.hidden must be numbers from 1, one for each layer, not [0]"),
        ("mlp --model.activation swish", "--model.activation: expected one of ['relu', 'tanh', 'sigmoid', 'gelu']"),
        ("mlp --model.dropout 1", "--model.dropout must be at least 0 and under 1, not 1.0"),
        ("vgg16 --model.width 0", "--model.width must be over 0, not 0.0"),
        ("vgg16 --model.dropout -0.1", "--model.dropout must be at least 0 and under 1, not -0.1"),
        ("resnet18 --model.width .nan", "--model.width must be over 0 and finite, not nan"),
        ("resnet18 --model.dropout 0.1", "unknown option --model.dropout"),
        ("vit_tiny --model.dropout 2", "--model.dropout must be at least 0 and under 1, not 2.0"),
        ("resnet19", "unknown model 'resnet19': did you mean resnet18?"),
        ("torchvision", "unknown model 'torchvision'"),
        ("torchvision:resnet18 --model.image_size -1", "--model.image_size must be at least 0, not -1"),
        ("torchvision:resnet18 --model.kwarg.a 1", "unknown option --model.kwarg.a: did you mean --model.kwargs?"),
        ("net --model.kwargs.a 1", "unknown option --model.kwargs.a"),
        ("net --init orthogonal", "--init: expected one of ['default', 'xavier', 'he'], not orthogonal"),
    ],
)
def test_mistakes_are_one_clear_line(flags: str, message: str):
    with pytest.raises(UsageError) as error:
        command_line.parse(["--model", *flags.split()])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
