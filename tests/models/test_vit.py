"""The vision transformer compared with torch's layers; its sizes, and where its mixtures are."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_zero import models
from cifar_zero.models import Layout
from cifar_zero.models.moe import MixtureOfExperts
from cifar_zero.models.vit import MLP, Attention, Block, ViT

SMALL = Layout(width=32, depth=2, heads=4)
OPTIONS: Any = SimpleNamespace(layout=SMALL, dropout=0.0, tokens_per_image=64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def mlp_parameters(width: int) -> int:
    """Returns the parameters of two linear layers with biases, width -> 4 * width -> width."""
    return (width + 1) * 4 * width + (4 * width + 1) * width


def vit_parameters(width: int, depth: int, classes: int) -> int:
    """Returns the parameters of patches (4 x 4 x 3), 64 positions, blocks of two norms, four projections and an MLP, a
    norm, and the head."""
    block = 2 * 2 * width + 4 * (width + 1) * width + mlp_parameters(width)
    return (4 * 4 * 3 + 1) * width + 64 * width + depth * block + 2 * width + (width + 1) * classes


@pytest.mark.parametrize(
    ("name", "width", "depth", "said"),
    [
        ("vit_tiny", 192, 12, "5.4 million"),
        ("vit_small", 384, 12, "21 million"),
        ("vit_base", 768, 12, "85 million"),
        ("vit_large", 1024, 24, "302 million"),
        ("vit_1b", 2048, 26, "1.3 billion"),
        ("vit_13b", 5120, 41, "13 billion"),
    ],
)
def test_sizes(name: str, width: int, depth: int, said: str):
    with torch.device("meta"):
        count = parameters(models.build(name, 10))
    assert count == vit_parameters(width, depth, classes=10)
    number, unit = said.split()
    decimals = len(number.partition(".")[2])
    assert f"{count / {'million': 1e6, 'billion': 1e9}[unit]:.{decimals}f}" == number
    assert (models.MODELS[name].__doc__ or "").endswith(f": {said} parameters")


@pytest.mark.parametrize("mlp_type", ["standard", "residual"])
def test_every_second_mlp_is_a_mixture(mlp_type: str):
    pyramid = [2, 2, 4, 4, 8, 8]
    with torch.device("meta"):
        net: Any = models.build("vit_moe", 10, num_experts=pyramid, mlp_type=mlp_type)
    mlps = [block.mlp for block in net.blocks]
    assert [type(mlp) for mlp in mlps] == 6 * [MLP, MixtureOfExperts]
    assert [len(mlp.experts) for mlp in mlps[1::2]] == pyramid
    assert all(isinstance(expert, MLP) for mlp in mlps[1::2] for expert in mlp.experts)
    beside = mlp_parameters(192) + 193 * 2 if mlp_type == "residual" else 0  # the MLP, and the shares of the two
    added = sum((experts - 1) * mlp_parameters(192) + 192 * experts + beside for experts in pyramid)
    assert parameters(net) == vit_parameters(192, 12, 10) + added


def test_one_number_of_experts_applies_to_all_mixtures():
    with torch.device("meta"):
        net: Any = models.build("vit_moe", 10, num_experts=[3], size="large")
    assert [len(block.mlp.experts) for block in net.blocks[1::2]] == 12 * [3]


def test_attention_is_the_plain_formula():
    attention = Attention(width=12, heads=3)
    x = torch.randn(2, 5, 12)
    q, k, v = (F.linear(x, *of) for of in zip(attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True))
    heads = []
    for head in range(3):
        own = slice(4 * head, 4 * head + 4)
        shares = (q[..., own] @ k[..., own].transpose(1, 2) / math.sqrt(4)).softmax(-1)
        heads.append(shares @ v[..., own])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, -1)), rtol=1e-5, atol=1e-6)


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


def test_a_block_is_torchs_encoder_layer():
    block = Block(SMALL.width, SMALL.heads, MLP(SMALL.width))
    layer = torch_layer(block)
    x = torch.randn(3, 7, SMALL.width, requires_grad=True)
    weights = torch.randn(3, 7, SMALL.width)
    found, expected = block(x), layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (gradient,), (expected_gradient,) = (torch.autograd.grad((of * weights).sum(), x) for of in (found, expected))
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


def test_the_model_computes_the_plain_formula():
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


@pytest.mark.parametrize("top_k", [1, 2])
def test_every_weight_of_a_mixture_learns(top_k: int):
    net = models.build("vit_moe", 5, num_experts=[4], mlp_type="residual", top_k=top_k)
    scores = net(torch.randn(2, 3, 32, 32))
    assert scores.shape == (2, 5)
    F.cross_entropy(scores, torch.tensor([0, 4])).backward()
    assert [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()] == []
