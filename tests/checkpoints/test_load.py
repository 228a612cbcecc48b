from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cifar_zero import models
from cifar_zero.checkpoints.weights import FILE, match, read_plain
from cifar_zero.core.errors import UsageError
from tests.support.helpers import largest_difference


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(3)
    return models.build("net", 10)


def test_weights_are_read_from_every_kind_of_file(net: nn.Module, tmp_path: Path):
    weights = dict(net.state_dict())
    torch.save(weights, tmp_path / "plain.pt")
    torch.save({"model": weights, "epoch": 3}, tmp_path / "torchvision.pth")
    torch.save({"state_dict": weights}, tmp_path / "timm.pth.tar")
    save_file(weights, tmp_path / "net.safetensors")
    for file in tmp_path.iterdir():
        assert largest_difference(read_plain(file), weights) == 0, file


def test_tensors_that_fit_are_loaded_and_the_rest_is_listed(net: nn.Module, tmp_path: Path):
    weights = {**net.state_dict(), "ema.step": torch.tensor(1.0)}
    torch.manual_seed(0)
    wider = models.build("net", 100)
    before = {name: value.clone() for name, value in wider.state_dict().items()}
    actual = match(wider, weights, "net.pt")
    assert actual.summary(tmp_path) == (
        "loaded 8 of 10 tensors; initialised: fc3.weight (100x84), fc3.bias (100); "
        "not used: fc3.weight (10x84), fc3.bias (10), ema.step (scalar)"
    )
    assert not (tmp_path / FILE).exists()
    wider.load_state_dict(actual.loaded, strict=False)
    for name, value in wider.state_dict().items():
        assert torch.equal(value, before[name] if name.startswith("fc3") else weights[name])


def test_a_file_without_fitting_weights_is_refused(net: nn.Module, tmp_path: Path):
    torch.save({"lr": 0.1}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match="contains no weights"):
        read_plain(tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"--weights vit\.pt: no tensor has a name and shape of the model"):
        match(net, models.build("vit_tiny", 10).state_dict(), "vit.pt")
