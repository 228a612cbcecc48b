"""How often a training step makes the host wait for the device, which then idles: never, but where DeepSpeed must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.changes import COUNTED
from tests.support.helpers import WHOLE, run_folder_of, train_all

pytestmark = pytest.mark.distributed

NORM = 1  # ZeRO reads whether the norm of all gradients is finite (is_invalid_grad_norm); no switch in 0.19.8
SERIAL = 13  # fp16/unfused_optimizer.py reads it of each of the ten gradients, of their ranks, and two norms; no switch
BUDGET = {
    "ddp 32-true": 0,
    "deepspeed_stage_2 32-true": NORM,
    "deepspeed_stage_3 bf16-mixed": NORM,
}
"""How often a step waits, for the tutorial's model."""
if WHOLE:
    BUDGET |= {
        "ddp bf16-mixed": 0,
        "fsdp2 bf16-mixed": 0,
        "deepspeed_stage_0 32-true": 0,
        "deepspeed_stage_0 bf16-mixed": SERIAL,
        "deepspeed_stage_1 32-true": NORM,
        "deepspeed_stage_1 bf16-mixed": 0,
        "deepspeed_stage_2 bf16-mixed": 0,
        "deepspeed_stage_3 32-true": NORM,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "8", "--log_interval", "100"]
    same += ["--max_steps", str(COUNTED[-1] + 2), "--data.val_fraction", "0", "--logger", "none"]
    same += ["--trainer.limit_test_batches", "1"]
    sharded = ["--zero.param_persistence_threshold", "0"]
    asked: dict[Path, list[str]] = {}
    for name in BUDGET:
        strategy, precision = name.split()
        more = sharded if strategy == "deepspeed_stage_3" else []
        asked[folder / name] = [*same, "--strategy", strategy, "--precision", precision, *more]
    train_all(asked, "counted_syncs")
    return folder


@pytest.mark.parametrize("name", BUDGET)
def test_a_step_waits_no_more_often_for_the_device(name: str, runs: Path):
    found = json.loads((run_folder_of(runs / name) / "syncs.json").read_text())
    assert sum(found.values()) == BUDGET[name] * len(COUNTED), found
