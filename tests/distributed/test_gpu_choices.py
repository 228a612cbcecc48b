"""Tests torch's fused optimizers, which a run uses on a GPU, on two CPU ranks with mixed precision and clipping."""

from pathlib import Path

import pytest

from tests.distributed.changes import optimizers_of_a_gpu
from tests.support.helpers import WHOLE, last_checkpoint, losses, train_all

pytestmark = pytest.mark.distributed

RUNS = {
    "net ddp 32-true": True,
    "net deepspeed_stage_2 32-true": True,
}
"""Whether the optimizer of a run is fused, by model, strategy and precision."""
if WHOLE:
    RUNS |= {
        "net ddp bf16-mixed": False,
        "net fsdp2 32-true": True,
        "net deepspeed_stage_3 32-true": True,
        "vit_tiny ddp 32-true": True,
        "vit_tiny fsdp2 32-true": True,
        "vit_tiny fsdp2 bf16-mixed": True,
        "vit_tiny tensor_parallel 32-true": False,
        "vit_tiny pipeline bf16-mixed": False,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "8", "--max_steps", "3"]
    same += ["--data.val_fraction", "0", "--logger", "none", "--trainer.limit_test_batches", "1"]
    same += ["--optimizer", "adam", "--gradient_clip_val", "1"]
    flags: dict[Path, list[str]] = {}
    for name in RUNS:
        model, strategy, precision = name.split()
        flags[folder / name] = [*same, "--model", model, "--strategy", strategy, "--precision", precision]
    train_all(flags, optimizers_of_a_gpu)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_fused_where_supported_and_the_same_losses(name: str, runs: Path):
    """DeepSpeed's own Adam, which would have to be compiled, has no option `fused`."""
    (group, *_) = last_checkpoint(runs / name)["optimizer_states"][0]["param_groups"]
    assert bool(group["fused"]) == RUNS[name]
    expected = losses(runs / f"{name.split()[0]} ddp 32-true")
    assert losses(runs / name) == pytest.approx(expected, abs=1e-2 if "bf16" in name else 1e-5)
