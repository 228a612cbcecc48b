from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cifar_zero.checkpoints.network import adapt, build, merged, on_meta
from cifar_zero.config.recipe import Choice, LoRAConfig, Recipe
from cifar_zero.core.errors import UsageError
from cifar_zero.models import Layout
from cifar_zero.models.vit import ViT

LORA = LoRAConfig(rank=2, alpha=6.0, target=["blocks.*.attention.*", "head"])
SMALL: Any = SimpleNamespace(layout=Layout(width=12, depth=2, heads=3), dropout=0.0, tokens_per_image=64)


def adapted() -> ViT:
    torch.manual_seed(0)
    net = ViT(10, SMALL)
    adapt(net, LORA)
    return net.eval()


@torch.no_grad()
def test_starts_as_the_plain_model_and_merges_into_one():
    torch.manual_seed(0)
    plain, images = ViT(10, SMALL).eval(), torch.randn(4, 3, 32, 32)
    net = adapted()
    assert torch.equal(net(images), plain(images))
    for name, parameter in net.named_parameters():
        if name.endswith("lora_b"):
            parameter.normal_()
    assert not torch.allclose(net(images), plain(images), atol=0.1)
    plain.load_state_dict(merged(net.state_dict(), LORA.alpha))
    torch.testing.assert_close(plain(images), net(images), rtol=1e-5, atol=1e-5)


def test_names_and_shapes():
    net = adapted()
    plain = ViT(10, SMALL).state_dict()
    added = {name: tuple(value.shape) for name, value in net.state_dict().items() if name not in plain}
    assert added == {
        **{f"blocks.{block}.attention.qkv.lora_a": (2, 12) for block in range(2)},
        **{f"blocks.{block}.attention.qkv.lora_b": (36, 2) for block in range(2)},
        **{f"blocks.{block}.attention.out.lora_a": (2, 12) for block in range(2)},
        **{f"blocks.{block}.attention.out.lora_b": (12, 2) for block in range(2)},
        **{"head.lora_a": (2, 12), "head.lora_b": (10, 2)},
    }
    assert merged(plain, 1.0).keys() == plain.keys() <= net.state_dict().keys()


def test_dropout_acts_only_on_the_adapter_and_in_training():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 8))
    adapt(net, LoRAConfig(rank=2, target=["0"], dropout=0.5))
    x = torch.randn(3, 64)
    assert torch.equal(net(x), net(x))  # B is zero
    nn.init.ones_(net[0].lora_b)  # pyright: ignore
    assert not torch.equal(net(x), net(x))
    assert torch.equal(net.eval()(x), net(x))


def test_only_the_adapters_and_the_named_parameters_are_trained():
    net = on_meta(
        Recipe(
            model=Choice("vit_tiny"),
            trainable=["head.*"],
            lora=LoRAConfig(rank=8, target=["blocks.*.attention.qkv"]),
        ),
        10,
    )
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    adapters = {f"blocks.{block}.attention.qkv.lora_{side}" for block in range(12) for side in "ab"}
    assert trained == {"head.weight", "head.bias"} | adapters


@pytest.mark.parametrize(
    ("model", "target", "expected"),
    [
        ("net", "fc9", "names no linear layer that can have an adapter: did you mean fc"),
        ("net", "conv1", "names no linear layer that can have an adapter: did you mean fc1"),
        ("net_moe", "fc3.0.gate.wg", "names no linear layer that can have an adapter"),
    ],
)
def test_refused(model: str, target: str, expected: str):
    with pytest.raises(UsageError, match=expected) as error:
        build(Recipe(model=Choice(model), lora=LoRAConfig(rank=1, target=[target])), 10)
    assert "\n" not in str(error.value)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(UsageError, match="names no linear layer"):
        adapt(nn.Sequential(nn.Conv2d(3, 8, 3)), LoRAConfig(rank=1, target=["*"]))
