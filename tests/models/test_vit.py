"""Compares the vision transformer with torch's layers, and tests its sizes."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_zero import models
from cifar_zero.build_model import create_meta_model
from cifar_zero.config.recipe import Choice, Recipe
from cifar_zero.models import Layout
from cifar_zero.models.vit import ViT

SMALL = Layout(width=32, depth=2, heads=4)
OPTIONS: Any = SimpleNamespace(layout=SMALL, dropout=0.0, tokens_per_image=64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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


def test_the_model_computes_the_plain_formula():
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
