"""Tests which parameters of a model are trained, and adapters."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cifar_zero.build_model import adapt, check_patterns, create_meta_model, create_model, merged
from cifar_zero.config.recipe import Choice, LoRAConfig, Recipe
from cifar_zero.core.errors import UsageError
from cifar_zero.models import Layout
from cifar_zero.models.vit import ViT


def test_a_pattern_without_a_match_is_refused():
    net = create_meta_model(Recipe(model=Choice("vit_tiny"), trainable=["head"]), 10)
    with pytest.raises(
        UsageError, match=r"--trainable head matches no parameter .* did you mean head\.\w+ or "
    ) as error:
        check_patterns(net, ["head"], ep_size=1)
    assert "\n" not in str(error.value)


def test_experts_spread_over_ranks_are_all_trained_or_all_frozen():
    model = Choice("net_moe", {"num_experts": [4], "ep_size": 2})
    one, all_of_them = ["fc3.0.experts.1.*"], ["fc3.0.experts.*"]
    with pytest.raises(UsageError, match=r"train all or none of fc3\.0\.experts\.\*\.weight"):
        check_patterns(create_meta_model(Recipe(model=model, trainable=one), 10), one, ep_size=2)
    check_patterns(create_meta_model(Recipe(model=model, trainable=all_of_them), 10), all_of_them, ep_size=2)


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
