"""Tests torch's fused optimizers, which a run uses on a GPU, on two CPU ranks with mixed precision and clipping."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.changes import optimizers_of_a_gpu
from tests.support.helpers import WHOLE, last_checkpoint, losses, train_all

pytestmark = pytest.mark.distributed

NET = ["--optimizer.lr", "0.05", "--gradient_clip_val", "1"]
VIT = ["--model", "vit_tiny", "--optimizer", "adam", "--gradient_clip_val", "1"]
BF16 = ["--precision", "bf16-mixed"]
RUNS = {
    "net": (["--strategy", "ddp", *NET], True),
    "net ddp bf16": (["--strategy", "ddp", *NET, *BF16], False),
    "net deepspeed_stage_2": (["--strategy", "deepspeed_stage_2", *NET], True),
}
MORE = {
    "net ddp bf16 unclipped": (["--strategy", "ddp", *NET, *BF16, "--gradient_clip_val", "0"], True),
    "net fsdp2": (["--strategy", "fsdp2", *NET], False),
    "net deepspeed_stage_3": (["--strategy", "deepspeed_stage_3", *NET], True),
    "vit": (["--strategy", "ddp", *VIT], True),
    "vit fsdp2": (["--strategy", "fsdp2", *VIT], True),
    "vit fsdp2 bf16": (["--strategy", "fsdp2", *VIT, *BF16], True),
    "vit tensor_parallel": (["--strategy", "tensor_parallel", *VIT], False),
    "vit pipeline bf16": (["--strategy", "pipeline", *VIT, *BF16], False),
}
"""The flags of each run, and whether its optimizer is fused. The first word of a run's name is its model."""
if WHOLE:
    RUNS |= MORE


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "8", "--max_steps", "3"]
    same += ["--data.val_fraction", "0", "--logger", "none", "--trainer.limit_test_batches", "1"]
    train_all({folder / name: [*same, *flags] for name, (flags, _) in RUNS.items()}, optimizers_of_a_gpu)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_fused_where_supported_and_the_same_losses(name: str, runs: Path):
    (group, *_) = last_checkpoint(runs / name)["optimizer_states"][0]["param_groups"]
    assert bool(group["fused"]) == RUNS[name][1]
    expected = losses(runs / name.split()[0])
    assert losses(runs / name) == pytest.approx(expected, abs=1e-2 if "bf16" in name else 1e-5)
