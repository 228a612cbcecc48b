"""Activation checkpointing and offload on a GPU give the same losses and a lower peak of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import assert_ok, run_folder_of, run_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

SWITCHES = [
    ["--activation_checkpointing"],
    ["--activation_offload"],
    ["--activation_checkpointing", "--activation_offload"],
]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", ["baseline", "deepspeed_stage_2", "deepspeed_stage_3", "fsdp2"])
def test_less_memory_and_the_same_loss(strategy: str, precision: str, small_data: list[str], tmp_path: Path):
    """vit_tiny stores 9.5 MB of activations per image in float32. The inputs of its blocks are 0.6 MB of this."""
    same = [*small_data, "--model", "vit_tiny", "--batch_size", "64", "--max_steps", "8", "--optimizer.lr", "0.01"]
    same += ["--strategy", strategy, "--precision", precision]
    plain = metrics_of(same, tmp_path / "plain")
    for number, switch in enumerate(SWITCHES):
        metrics = metrics_of([*same, *switch], tmp_path / str(number))
        # Not bit for bit: GPU kernels may sum with atomics.
        assert metrics["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-3), switch
        assert metrics["mem/peak_rank_bytes"][0] < 0.7 * plain["mem/peak_rank_bytes"][0], switch


def metrics_of(flags: list[str], out: Path) -> dict[str, Any]:
    assert_ok(run_program("train.py", "--devices", "1", *flags, "--out", str(out)))
    return json.loads((run_folder_of(out) / "metrics.json").read_text())
