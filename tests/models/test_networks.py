"""Compares the networks with formulas, torchvision's models and torch's layers, and tests their sizes."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from cifar_zero import models
from cifar_zero.build_model import create_meta_model
from cifar_zero.config.recipe import Choice, Recipe
from cifar_zero.models import Layout
from cifar_zero.models.vit import ViT


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_net_computes_the_plain_formula():
    net: Any = models.build("net", num_classes=10)
    images = torch.randn(3, 3, 32, 32)
    x = F.max_pool2d(F.conv2d(images, net.conv1.weight, net.conv1.bias).relu(), 2)
    x = F.max_pool2d(F.conv2d(x, net.conv2.weight, net.conv2.bias).relu(), 2).reshape(3, 400)
    for layer in (net.fc1, net.fc2):
        x = (x @ layer.weight.T + layer.bias).relu()
    torch.testing.assert_close(net(images), x @ net.fc3.weight.T + net.fc3.bias)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_resnets_are_torchvisions_but_for_the_stem(name: str):
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
    net: Any = models.build("vgg16", 3, width=1 / 16).eval()
    expected: Any = torchvision.models.VGG(net.features, num_classes=3, init_weights=False).eval()
    expected.classifier = net.classifier
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(net(images), expected(images))


def images() -> Tensor:
    """Returns smooth images, whose neighbouring pixels are similar: float32 (64, 3, 32, 32), between -1 and 1."""
    noise = torch.randn(64, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    return F.interpolate(noise, (32, 32), mode="bilinear").tanh() * torch.tensor([1.0, 0.5, 0.25])[:, None, None]


def test_the_parameters_of_speednet_are_the_references():
    """The number is counted from airbench94_muon.py. Its model has 24 filters of 2 x 2 pixels, six convolutions, six
    batch norms and one matrix."""
    net = models.build("speednet", 10)
    assert sum(parameter.numel() for parameter in net.parameters()) == 1_972_792
    frozen = {name for name, parameter in net.named_parameters() if not parameter.requires_grad}
    assert frozen == {"whiten.weight", *(f"blocks.{i}.norm{j}.weight" for i in range(3) for j in (1, 2))}


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


@pytest.mark.parametrize("training", [True, False])
def test_the_scores_of_speednet_are_those_of_a_second_formulation(training: bool):
    net = models.build("speednet", 7, width=0.25).train(training)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    for name in state:
        if name.endswith(("running_mean", "running_var", "bias")):
            state[name] = torch.rand_like(state[name]) + 0.5
    net.load_state_dict(state)

    def normed(x: Tensor, name: str) -> Tensor:
        mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        if training:
            var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
        x = (x - mean[:, None, None]) / (var[:, None, None] + 1e-12).sqrt() + state[f"{name}.bias"][:, None, None]
        return gelu(x)

    x = gelu(F.conv2d(images(), state["whiten.weight"], state["whiten.bias"]))
    for i in range(3):
        x = F.conv2d(x, state[f"blocks.{i}.conv1.weight"], padding=1)
        side = x.shape[2] // 2
        x = x[:, :, : 2 * side, : 2 * side].unflatten(3, (side, 2)).unflatten(2, (side, 2)).amax((3, 5))
        x = normed(x, f"blocks.{i}.norm1")
        x = normed(F.conv2d(x, state[f"blocks.{i}.conv2.weight"], padding=1), f"blocks.{i}.norm2")
    assert x.shape == (64, 64, 3, 3)
    expected = x.amax((2, 3)) @ state["head.weight"].T / (16 * x.shape[1] ** 0.5)
    assert torch.allclose(net(images()), expected, rtol=1e-4, atol=1e-5)


SMALL = Layout(width=32, depth=2, heads=4)
OPTIONS: Any = SimpleNamespace(layout=SMALL, dropout=0.0, tokens_per_image=64)


@pytest.mark.parametrize("name", [name for name in models.MODELS if name.startswith("vit_") and name != "vit_moe"])
def test_sizes_are_those_of_the_help(name: str):
    said = re.search(r": ([\d.]+) (million|billion) parameters$", models.MODELS[name].__doc__ or "")
    assert said
    number, unit = said.groups()
    decimals = len(number.partition(".")[2])
    net = create_meta_model(Recipe(model=Choice(name)), 10)
    count = sum(parameter.numel() for parameter in net.parameters()) / {"million": 1e6, "billion": 1e9}[unit]
    assert f"{count:.{decimals}f}" == number


def torch_layer(block: Any) -> nn.TransformerEncoderLayer:
    """Returns torch's encoder layer with the weights of a block."""
    width, heads = block.norm1.normalized_shape[0], block.attention.heads
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True
    )
    names = {"norm1": "norm1", "norm2": "norm2", "attention.out": "self_attn.out_proj", "mlp.0": "linear1"}
    names |= {"mlp.2": "linear2", "attention.qkv": "self_attn.in_proj"}
    state = {}
    for name, value in block.state_dict().items():
        module, _, kind = name.rpartition(".")
        state[f"{names[module]}{'_' if module == 'attention.qkv' else '.'}{kind}"] = value
    layer.load_state_dict(state)
    return layer


def test_the_transformer_computes_the_plain_formula():
    """The reference has torch's encoder layers as blocks."""
    net: Any = ViT(7, OPTIONS)
    images = torch.randn(3, 3, 32, 32)
    rows = [images[:, :, y : y + 4, x : x + 4].flatten(1) for y in range(0, 32, 4) for x in range(0, 32, 4)]
    tokens: Tensor = torch.stack(rows, 1) @ net.patches.weight.flatten(1).T + net.patches.bias + net.positions
    assert tokens.shape == (3, 64, SMALL.width)
    for block in net.blocks:
        tokens = torch_layer(block)(tokens)
    expected = F.layer_norm(tokens, [SMALL.width], net.norm.weight, net.norm.bias).mean(1) @ net.head.weight.T
    scores = net(images)
    assert scores.shape == (3, 7)
    torch.testing.assert_close(scores, expected + net.head.bias, rtol=1e-5, atol=1e-5)
