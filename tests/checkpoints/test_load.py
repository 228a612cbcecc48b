from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cifar_zero import models
from cifar_zero.build_model import build
from cifar_zero.checkpoints.read import RECORD
from cifar_zero.checkpoints.weights import FILE, load_full_weights, match, read_plain
from cifar_zero.config.recipe import Choice, LoRAConfig, Recipe
from cifar_zero.config.settings import make_settings, tree_of
from cifar_zero.core.errors import UsageError


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(3)
    return models.build("net", 10)


def test_every_kind_of_file(net: nn.Module, tmp_path: Path):
    weights = dict(net.state_dict())
    torch.save(weights, tmp_path / "plain.pt")
    torch.save({"model": weights, "epoch": 3}, tmp_path / "torchvision.pth")
    torch.save({"state_dict": weights}, tmp_path / "timm.pth.tar")
    save_file(weights, tmp_path / "net.safetensors")
    for file in tmp_path.iterdir():
        found = read_plain(file)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], value) for name, value in weights.items()), file


def test_adapters_in_a_checkpoint_are_merged(net: nn.Module, tmp_path: Path):
    lora = LoRAConfig(rank=2, alpha=4.0, target=["fc1"])
    adapted = build(Recipe(model=Choice("net"), lora=lora), 10)
    load_full_weights(adapted, net.state_dict())
    nn.init.ones_(adapted.get_parameter("fc1.lora_b"))
    state = {f"net.{name}": value for name, value in adapted.state_dict().items()}
    record = {"config": tree_of(make_settings(lora=lora)), "classes": []}
    torch.save({"state_dict": state, RECORD: record}, tmp_path / "last.ckpt")
    found = read_plain(tmp_path / "last.ckpt")
    assert found.keys() == net.state_dict().keys()
    added = 2.0 * torch.ones(120, 2) @ adapted.get_parameter("fc1.lora_a")
    torch.testing.assert_close(found["fc1.weight"], net.state_dict()["fc1.weight"] + added)
    assert torch.equal(found["fc2.weight"], net.state_dict()["fc2.weight"])


def test_tensors_that_fit_are_loaded_and_the_rest_is_listed(net: nn.Module, tmp_path: Path):
    weights = {**net.state_dict(), "ema.step": torch.tensor(1.0)}
    torch.manual_seed(0)
    wider = models.build("net", 100)
    before = {name: value.clone() for name, value in wider.state_dict().items()}
    found = match(wider, weights, "net.pt")
    assert found.summary(tmp_path) == (
        "loaded 8 of 10 tensors; initialised: fc3.weight (100x84), fc3.bias (100); "
        "not used: fc3.weight (10x84), fc3.bias (10), ema.step (scalar)"
    )
    assert not (tmp_path / FILE).exists()
    load_full_weights(wider, found.loaded)
    for name, value in wider.state_dict().items():
        assert torch.equal(value, before[name] if name.startswith("fc3") else weights[name])


def test_refused(net: nn.Module, tmp_path: Path):
    torch.save({"lr": 0.1}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match="contains no weights"):
        read_plain(tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"--weights vit\.pt: no name and shape fits the model"):
        match(net, models.build("vit_tiny", 10).state_dict(), "vit.pt")
