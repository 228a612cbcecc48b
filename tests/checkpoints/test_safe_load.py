"""Loads files of torch.save that are damaged or would run code."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from cifar_zero.checkpoints.safe_load import load_safely
from cifar_zero.core.errors import UsageError
from tests.users_code.evil import Evil


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


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04" + bytes(100)])
def test_a_file_that_is_not_a_checkpoint_is_refused(content: bytes, tmp_path: Path):
    file = tmp_path / "last.ckpt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="damaged or not a checkpoint"):
        load_safely(file)
