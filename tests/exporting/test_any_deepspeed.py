"""Exports checkpoints of DeepSpeed's own loop, and compares the weights with the output of DeepSpeed's zero_to_fp32."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cifar_zero.core.errors import UsageError
from cifar_zero.exporting import export
from tests.exporting.deepspeed_loops import CASES, Tied, save_all
from tests.support.helpers import on_ranks
from tests.users_code.evil import Evil

pytestmark = pytest.mark.distributed

SECOND_NAMES = {"again.weight", "again.bias"}  # second names of a module that the model has twice

TAG = "global_step2"
MODEL = "mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a checkpoint of each case in CASES."""
    folder = tmp_path_factory.mktemp("saved")
    on_ranks(2, save_all, str(folder))
    return folder


def exported(checkpoint: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    arguments = ["export", str(checkpoint), "--to", "safetensors", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert export.main() == 0
    return load_file(output)


@pytest.mark.parametrize("case", CASES)
def test_the_weights_of_zero_to_fp32(
    case: str,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    folder = saved / case
    ours = exported(folder, tmp_path / "out.safetensors", monkeypatch)
    stage = int(case[6])
    if stage == 3:
        assert "stored no values for them: again.weight, again.bias" in capsys.readouterr().out
    net = Tied()
    assert ours.keys() == net.state_dict().keys() - (SECOND_NAMES if stage == 3 else set())
    assert {name for name, value in ours.items() if value.dtype != torch.float32} == {"mask"}
    torch.testing.assert_close(ours["frozen.weight"], net.frozen.weight.data, rtol=2**-8, atol=0)  # bfloat16 rounds
    if stage < 3:
        assert all(torch.equal(ours[name], ours[name.replace("again", "first")]) for name in SECOND_NAMES)
    if case in ("stage_0", "stage_1_fp32_gradients"):  # zero_to_fp32 refuses both
        theirs = torch.load(folder / TAG / MODEL, weights_only=True)["module"]
        if stage == 1:  # the model has the weights in bfloat16
            assert not torch.equal(ours["scale"], theirs["scale"].float())
            ours = {name: value.to(theirs[name].dtype) for name, value in ours.items()}
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder)) or {}
    assert theirs.keys() >= {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    for name, value in theirs.items():
        assert torch.equal(ours[name], value.to(ours[name].dtype)), name


@pytest.mark.parametrize(
    ("case", "lost", "message"),
    [
        ("stage_2", "latest", r"has no file named latest: give the checkpoint folder, such as .*global_step2"),
        ("stage_2", f"{TAG}/{MODEL}", r"\*model_states.pt is missing"),
        (
            "stage_2",
            f"{TAG}/zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "is incomplete: it has 1 optimizer files, not 2",
        ),
        ("stage_3", f"{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt", "is incomplete: it has 1 model files, not 2"),
    ],
)
def test_a_file_is_missing(
    case: str, lost: str, message: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(saved / case, tmp_path / "saved")
    (tmp_path / "saved" / lost).unlink()
    with pytest.raises(UsageError, match=message):
        exported(tmp_path / "saved", tmp_path / "out.safetensors", monkeypatch)
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"callback": Evil(Path("never"))}, "loads .*mkdir, which could run any code: add --trust"),
        ({"num_experts": [4]}, "has experts, or pipeline or tensor parallelism"),
        ({"module": None}, "has experts, or pipeline or tensor parallelism"),
        ({"param_shapes": [{"scale": torch.Size([1000])}]}, "is not a complete DeepSpeed checkpoint: ValueError"),
    ],
    ids=["code", "experts", "pipeline", "another model"],
)
def test_content_that_is_refused(
    changes: dict[str, object],
    message: str,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    shutil.copytree(saved / "stage_2", tmp_path / "saved")
    file = tmp_path / "saved" / TAG / MODEL
    torch.save({**torch.load(file, weights_only=True), **changes}, file)
    with pytest.raises(UsageError, match=message):
        exported(tmp_path / "saved", tmp_path / "out.safetensors", monkeypatch)
