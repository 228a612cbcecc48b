"""Every strategy on a GPU, through the same command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from callbacks.peaks import peak_by_name
from strategies import STRATEGIES
from tests.helpers import assert_ok, run_folder_of, run_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

ON_ONE_GPU = [name for name in STRATEGIES if not name.endswith(("nvme", "superoffload"))]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("strategy", ON_ONE_GPU)
def test_trains_and_tests(strategy: str, precision: str, small_data: list[str], tmp_path: Path):
    flags = ["--strategy", strategy, "--precision", precision, "--optimizer", "adam", "--batch_size", "16"]
    assert_ok(run_program("train.py", *small_data, *flags, "--max_steps", "24", "--out", str(tmp_path)))
    metrics = json.loads((run_folder_of(tmp_path) / "metrics.json").read_text())
    assert (metrics["accelerator"], metrics["precision"]) == ("gpu", precision)
    assert 2.0 < metrics["test/loss"] < 2.6  # random images: a little off ln 10


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("model", ["net_moe", "vit_moe"])
@pytest.mark.parametrize("strategy", ["baseline", *(f"deepspeed_stage_{stage}" for stage in range(3))])
def test_mixtures_of_experts(strategy: str, model: str, precision: str, small_data: list[str], tmp_path: Path):
    """All experts on the one GPU; tested by the engine and by the plain network to the same loss."""
    flags = ["--strategy", strategy, "--precision", precision, "--optimizer", "adam", "--batch_size", "16"]
    flags += ["--model", model, "--model.num_experts", "[4]", "--gradient_clip_val", "1"]
    assert_ok(run_program("train.py", *small_data, *flags, "--max_steps", "12", "--out", str(tmp_path)))
    run = run_folder_of(tmp_path)
    metrics = json.loads((run / "metrics.json").read_text())
    assert 2.0 < metrics["test/loss"] < 2.8  # random images: a little off ln 10
    done = run_program("evaluate.py", str(run))
    assert_ok(done)
    assert float(done.stdout.split("test loss")[1]) == pytest.approx(metrics["test/loss"], abs=1e-3)


@pytest.mark.parametrize("strategy", ["baseline", "ddp", "deepspeed_stage_0", "deepspeed_stage_2"])
@pytest.mark.parametrize("switch", ["--compile", "--cuda_graphs"])
def test_compiled_and_as_graphs(switch: str, strategy: str, small_data: list[str], tmp_path: Path):
    flags = ["--strategy", strategy, "--optimizer", "adam", "--batch_size", "16", "--max_steps", "40"]
    losses = []
    for extra in ([], [switch]):
        out = tmp_path / "-".join(["out", *extra])
        assert_ok(run_program("train.py", *small_data, *flags, *extra, "--out", str(out)))
        losses.append(json.loads((run_folder_of(out) / "metrics.json").read_text())["test/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_benchmark_times_the_steps_of_the_device(tmp_path: Path):
    """By CUDA events, each step, and by the host's clock, all of them together."""
    flags = ["--data.source", "synthetic", "--data.root", str(tmp_path / "data"), "--batch_size", "512"]
    done = run_program("train.py", *flags, "--bench_steps", "100", "--out", str(tmp_path / "out"))
    assert_ok(done)
    metrics = json.loads((run_folder_of(tmp_path / "out") / "metrics.json").read_text())
    shortest, median, longest = (metrics[f"perf/step_time_{name}_ms"] for name in ("min", "median", "max"))
    assert 0 < shortest <= median <= longest
    assert 0.9 * shortest < metrics["perf/step_time_ms"] < 1.1 * longest
    assert 0 < metrics["perf/data_time_ms"] < metrics["perf/step_time_ms"]
    peak = peak_by_name(metrics["device_name"], metrics["precision"])
    expected = None if peak is None else pytest.approx(metrics["perf/tflops"] * 1e12 / peak)
    assert metrics["perf/mfu"] == expected
