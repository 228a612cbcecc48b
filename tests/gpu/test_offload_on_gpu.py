"""DeepSpeed's switches that only CUDA has: each trains for a few steps, as without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers import assert_ok, run_folder_of, run_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

SMALL = ["--model", "vit_tiny", "--optimizer", "adamw", "--precision", "bf16-mixed", "--batch_size", "16"]
SUPER = ["--strategy", "deepspeed_stage_3_superoffload", "--offload.pin_memory", "true"]
SUB_GROUPS = ["--zero.sub_group_size", "500000"]
ON_ONE_GPU = {
    "superoffload": SUPER,
    "superoffload of many sub-groups": [*SUPER, *SUB_GROUPS, "--offload.cpuadam_cores_perc", "0.5"],
    "superoffload with a ratio": [*SUPER, *SUB_GROUPS, "--offload.ratio", "0.5"],
    "offload with a ratio": ["--strategy", "deepspeed_stage_3_offload", *SUB_GROUPS, "--offload.ratio", "0.5"],
    "pinned": ["--strategy", "deepspeed_stage_2_offload", "--offload.pin_memory", "true"],
}
ON_TWO_GPUS = {
    "second copy": ["--zero.hpz_partition_size", "2"],
    "quantised weights": ["--zero.quantized_weights", "true"],
    "both": ["--zero.hpz_partition_size", "2", "--zero.quantized_weights", "true"],
}


def trained(folder: Path, small_data: list[str], *flags: str) -> float:
    """The test's loss after a few steps."""
    assert_ok(run_program("train.py", *small_data, *SMALL, *flags, "--max_steps", "12", "--out", str(folder)))
    return json.loads((run_folder_of(folder) / "metrics.json").read_text())["test/loss"]


@pytest.mark.parametrize("name", ON_ONE_GPU)
def test_on_one_gpu(name: str, small_data: list[str], tmp_path: Path):
    expected = trained(tmp_path / "expected", small_data, "--strategy", "deepspeed_stage_3")
    assert trained(tmp_path / "switched", small_data, *ON_ONE_GPU[name]) == pytest.approx(expected, rel=0.02)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ON_TWO_GPUS)
def test_on_two_gpus(name: str, small_data: list[str], tmp_path: Path):
    """Quantised weights are others: the loss is near."""
    same = ["--strategy", "deepspeed_stage_3", "--devices", "2"]
    expected = trained(tmp_path / "expected", small_data, *same)
    assert trained(tmp_path / "switched", small_data, *same, *ON_TWO_GPUS[name]) == pytest.approx(expected, rel=0.05)
