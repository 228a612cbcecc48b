"""The plan predicts the memory of a rank on a GPU. Activation checkpointing and offload lower its peak, and give the
same losses."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.helpers import assert_ok, metrics_of, needs_gpu, run_program

pytestmark = needs_gpu

SWITCHES = [
    "--activation_checkpointing",
    "--activation_offload",
    "--activation_checkpointing --activation_offload",
]

PLANNED = ["baseline", *(f"deepspeed_stage_{stage}" for stage in ("1", "2", "3", "3_offload"))]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", ["baseline", "deepspeed_stage_2", "deepspeed_stage_3", "fsdp2"])
def test_less_memory_and_the_same_loss(strategy: str, precision: str, small_data: list[str], tmp_path: Path):
    """vit_tiny stores 9.5 MB of activations per image in float32. The inputs of its blocks are 0.6 MB of this."""
    same = [*small_data, "--model", "vit_tiny", "--batch_size", "64", "--max_steps", "8", "--optimizer.lr", "0.01"]
    same += ["--strategy", strategy, "--precision", precision]
    runs = {}
    for number, switch in enumerate(["", *SWITCHES]):
        out = tmp_path / str(number)
        assert_ok(run_program("train.py", "--devices", "1", *same, *switch.split(), "--out", str(out)))
        runs[switch] = metrics_of(out)
    for switch in SWITCHES:
        # Not bit for bit: GPU kernels may sum with atomics.
        assert runs[switch]["train/loss"] == pytest.approx(runs[""]["train/loss"], rel=1e-3), switch
        assert runs[switch]["mem/peak_rank_bytes"][0] < 0.7 * runs[""]["mem/peak_rank_bytes"][0], switch


@pytest.mark.parametrize("ranks", [number for number in (1, 2, 8) if number <= max(1, torch.cuda.device_count())])
@pytest.mark.parametrize(
    "strategy", ["baseline", *(f"deepspeed_stage_{stage}" for stage in ("1", "2", "3", "3_offload"))]
)
def test_the_plan_predicts_states_and_peak(strategy: str, ranks: int, tmp_path: Path):
    recipe = ["--model", "vit_large", "--optimizer", "adamw", "--precision", "bf16-mixed"]
    recipe += ["--batch_size", str(16 * ranks), "--devices", str(ranks)]
    done = run_program("plan", *recipe, "--device_memory", "130GB", "--json")
    (planned,) = [each for each in json.loads(done.stdout)["strategies"] if each["strategy"] == strategy]
    # Few images, because they take memory on the GPU too.
    images = ["--data.source", "synthetic", "--data.synthetic_size", "640", "--data.root", str(tmp_path / "data")]
    run = ["--strategy", strategy, "--bench_steps", "6", "--out", str(tmp_path / "runs")]
    assert_ok(run_program("train.py", *recipe, *images, *run))
    metrics = metrics_of(tmp_path / "runs")
    states = sum(sum(planned["states"][where].values()) for where in ("device", "host"))
    assert metrics["mem/model_state_rank_bytes"][0] == pytest.approx(states, rel=0.05)
    assert metrics["mem/peak_rank_bytes"][0] == pytest.approx(planned["device"], rel=0.15)
