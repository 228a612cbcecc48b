"""Loads weights of every kind of file, and files of torch.save that are damaged or would run code."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from safetensors.torch import save_file
from torch import nn

from cifar_zero import models
from cifar_zero.checkpoints.safe_load import load_safely
from cifar_zero.checkpoints.weights import FILE, match, read_plain
from cifar_zero.core.errors import UsageError
from tests.support.helpers import largest_difference
from tests.users_code.evil import Evil


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


def test_a_pickle_runs_code_only_with_trust(tmp_path: Path):
    file, proof = tmp_path / "evil.ckpt", tmp_path / "proof"
    torch.save({"state_dict": {"net.weight": torch.ones(1)}, "evil": Evil(proof)}, file)
    with pytest.raises(UsageError, match=r"mkdir, which could run any code: add --trust"):
        load_safely(file)
    assert not proof.exists()
    load_safely(file, trust=True)
    assert proof.exists()


class Attribute:
    """Is pickled as an attribute of an object, as Python 3.11.2 pickles a member of an enum."""

    def __init__(self, *path: Any) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return getattr, self.path


def test_getattr_reads_only_the_stage_of_zero(tmp_path: Path):
    file = tmp_path / "states.pt"
    torch.save({"zero_stage": Attribute(ZeroStageEnum, "weights")}, file)
    assert load_safely(file) == {"zero_stage": ZeroStageEnum.weights}
    torch.save([ZeroStageEnum.weights, Attribute("text", "format")], file)
    with pytest.raises(UsageError, match="reads format of text, which could run any code"):
        load_safely(file)
    torch.save(Attribute("text", "format"), file)
    with pytest.raises(UsageError, match=r"loads builtins\.getattr, which could run any code: add --trust"):
        load_safely(file)


def test_a_flipped_byte_of_a_tensor_is_found(tmp_path: Path):
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"net.weight": torch.zeros(1000)}}, file)
    assert torch.equal(load_safely(file)["state_dict"]["net.weight"], torch.zeros(1000))
    with zipfile.ZipFile(file) as archive:
        (record,) = [entry for entry in archive.infolist() if entry.filename.endswith("data/0")]
    content = bytearray(file.read_bytes())
    content[record.header_offset + 2000] ^= 1
    file.write_bytes(content)
    torch.load(file, weights_only=True)  # torch itself does not notice
    with pytest.raises(UsageError, match="does not match its checksum"):
        load_safely(file)
    with pytest.raises(UsageError, match="does not match its checksum"):
        load_safely(file, device="meta")
    load_safely(file, verify=False)
