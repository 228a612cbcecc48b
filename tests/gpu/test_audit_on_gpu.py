"""Every step of short runs on a GPU is audited and replayed, and agrees with plain PyTorch.

What no CPU can show: shards on the host beside a model on the GPU (ZeRO with offload), other kernels in the replay than
in the training (TF32, and parameters at other addresses), a replay that moves its copy to the GPU without its weights,
and the random numbers of a compiled model.
"""

import json
from pathlib import Path

import pytest

from tests.support.helpers import assert_ok, needs_gpu, run_folder_of, run_program

pytestmark = needs_gpu

STRATEGIES = ["baseline", "fsdp2", *(f"deepspeed_stage_{stage}" for stage in (0, 1, 2, 3))]
STRATEGIES += [f"deepspeed_stage_{stage}_offload" for stage in (1, 2, 3)]
FLAGS = ["--devices", "1", "--optimizer", "adamw", "--batch_size", "64", "--max_steps", "20", "--check_steps", "20"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_step_agrees(strategy: str, precision: str, small_data: list[str], tmp_path: Path):
    for number, model in enumerate(("net", "vit_tiny")):
        out = tmp_path / str(number)
        placement = ["--strategy", strategy, "--precision", precision, "--model", model]
        assert_ok(run_program("train.py", *small_data, *FLAGS, *placement, "--out", str(out)))
        verdict = json.loads((run_folder_of(out) / "step_check.json").read_text())
        assert (verdict["outcome"], verdict["steps"], verdict["replayed"]) == ("agrees", 20, 20), verdict
