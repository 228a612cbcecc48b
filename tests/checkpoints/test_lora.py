from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cifar_zero.build_model import adapt, create_model, merged
from cifar_zero.config.recipe import Choice, LoRAConfig, Recipe
from cifar_zero.core.errors import UsageError
from cifar_zero.models import Layout
from cifar_zero.models.vit import ViT

LORA = LoRAConfig(rank=2, alpha=6.0, target=["blocks.*.attention.*", "head"])
SMALL: Any = SimpleNamespace(layout=Layout(width=12, depth=2, heads=3), dropout=0.0, tokens_per_image=64)


@torch.no_grad()
def test_an_adapted_model_starts_as_the_plain_model_and_merges_into_one():
    torch.manual_seed(0)
    plain, images = ViT(10, SMALL).eval(), torch.randn(4, 3, 32, 32)
    net = ViT(10, SMALL).eval()
    net.load_state_dict(plain.state_dict())
    adapt(net, LORA)
    assert torch.equal(net(images), plain(images))
    for name, parameter in net.named_parameters():
        if name.endswith("lora_b"):
            parameter.normal_()
    assert not torch.allclose(net(images), plain(images), atol=0.1)
    plain.load_state_dict(merged(net.state_dict(), LORA.alpha))
    torch.testing.assert_close(plain(images), net(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "target", "expected"),
    [
        ("net", "conv1", "names no linear layer that can have an adapter: did you mean fc1"),
        ("net_moe", "fc3.0.gate.wg", "names no linear layer that can have an adapter"),
    ],
)
def test_a_layer_that_cannot_have_an_adapter_is_refused(model: str, target: str, expected: str):
    with pytest.raises(UsageError, match=expected):
        create_model(Recipe(model=Choice(model), lora=LoRAConfig(rank=1, target=[target])), 10)
