"""Tests the training of adapters and of a part of the model on two real ranks. Every strategy trains the same weights,
and the other weights stay unchanged. `make test-all` adds stages of ZeRO, and resumes."""

from pathlib import Path

import pytest
import torch

from cifar_zero import models
from tests.support.helpers import WHOLE, largest_difference, last_weights, metrics_of, train_all

pytestmark = pytest.mark.distributed

RECIPE = ["--lora.rank", "2", "--lora.target", "fc1", "fc2", "--trainable", "fc3.*"]
TRAINED = {"fc1.lora_a", "fc1.lora_b", "fc2.lora_a", "fc2.lora_b", "fc3.weight", "fc3.bias"}

RUNS = ["ddp", "deepspeed_stage_3"]
RESUMES = [("deepspeed_stage_3", "ddp")]
"""The strategy of a run that is resumed, and the strategy that resumes it."""
if WHOLE:
    STAGES = [f"deepspeed_stage_{stage}" for stage in range(4)]
    RUNS = ["ddp", *STAGES, "deepspeed_stage_3_offload"]
    RESUMES += [("deepspeed_stage_1", "deepspeed_stage_3")]
    RESUMES += [(start, stage) for stage in STAGES for start in ("ddp", stage)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file with the starting weights of all runs. They are of seed 1, so that no run draws them itself."""
    file = tmp_path_factory.mktemp("base") / "net.pt"
    torch.manual_seed(1)
    torch.save(models.build("net", 10).state_dict(), file)
    return file


@pytest.fixture(scope="module")
def out(base: Path, small_data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of all runs. Their names are `STRATEGY`, `uninterrupted`, and `STRATEGY to STRATEGY`."""
    out = tmp_path_factory.mktemp("runs")
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "16", "--logger", "none"]
    same += ["--optimizer", "adam", "--log_interval", "4", "--trainer.limit_test_batches", "1"]
    same += [*RECIPE, "--max_steps"]
    flags = {out / name: [*same, "8", "--weights", str(base), "--strategy", name] for name in RUNS}
    flags[out / "uninterrupted"] = [*same, "14", "--weights", str(base), "--strategy", "ddp"]
    for start, name in RESUMES:
        flags[out / f"{start} to {name}"] = [*same, "14", "--resume", str(out / start), "--strategy", name]
    train_all(flags)
    return out


@pytest.mark.parametrize("strategy", RUNS[1:])
def test_ends_with_the_weights_of_ddp(strategy: str, out: Path):
    """The weights agree bit for bit, except with DeepSpeed's own Adam."""
    difference = largest_difference(last_weights(out / strategy), last_weights(out / "ddp"))
    assert difference <= (1e-4 if strategy.endswith("offload") else 0)


@pytest.mark.parametrize("strategy", RUNS)
def test_trains_only_the_named_parameters(strategy: str, base: Path, out: Path):
    start, end = torch.load(base), last_weights(out / strategy)
    assert end.keys() == start.keys() | TRAINED
    for key, value in end.items():
        assert (key in TRAINED) == (key not in start or not torch.equal(value, start[key])), key
    assert all(bool(end[key].any()) for key in TRAINED)  # B too is no longer zero
    metrics = metrics_of(out / strategy)
    assert metrics["trained_parameters"] == sum(end[key].numel() for key in TRAINED)
    assert metrics["parameters"] == sum(value.numel() for value in end.values())


@pytest.mark.parametrize(("start", "strategy"), RESUMES)
def test_resumes_in_any_shape(start: str, strategy: str, out: Path):
    actual, expected = last_weights(out / f"{start} to {strategy}"), last_weights(out / "uninterrupted")
    assert largest_difference(actual, expected) < 1e-6
