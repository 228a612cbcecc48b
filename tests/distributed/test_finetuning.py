"""Tests the training of adapters, or of a part of the model, on two real ranks. Every strategy trains the same
weights, and the other weights stay unchanged. `make test-all` adds stages of ZeRO, a part of the model, and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cifar_zero import models
from tests.support.helpers import WHOLE, largest_difference, last_weights, metrics_of, train_all

pytestmark = pytest.mark.distributed

RECIPES = {
    "lora": ["--lora.rank", "2", "--lora.target", "fc1", "fc2", "--trainable", "fc3.*"],
    "part": ["--trainable", "conv2.*", "fc3.bias"],
}
TRAINED = {
    "lora": {"fc1.lora_a", "fc1.lora_b", "fc2.lora_a", "fc2.lora_b", "fc3.weight", "fc3.bias"},
    "part": {"conv2.weight", "conv2.bias", "fc3.bias"},
}

RUNS = [("lora", "ddp"), ("lora", "deepspeed_stage_3")]
GONE_ON = [("lora", "deepspeed_stage_3", "ddp")]
"""The run that is resumed, and the strategy that resumes it."""
if WHOLE:
    STAGES = [f"deepspeed_stage_{stage}" for stage in range(4)]
    RUNS += [("part", "ddp"), ("part", "deepspeed_stage_3_offload"), *(("part", stage) for stage in STAGES)]
    RUNS += [("lora", stage) for stage in STAGES[:3]]
    GONE_ON += [("lora", "deepspeed_stage_1", "deepspeed_stage_3")]
    GONE_ON += [("part", "ddp", stage) for stage in STAGES] + [("part", stage, stage) for stage in STAGES]

STEPS, MORE = 8, 14


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file with the starting weights of all runs. They are of seed 1, so that no run draws them itself."""
    file = tmp_path_factory.mktemp("base") / "net.pt"
    torch.manual_seed(1)
    torch.save(models.build("net", 10).state_dict(), file)
    return file


@pytest.fixture(scope="module")
def out(base: Path, small_data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of all runs. Their names are `RECIPE STRATEGY`, `RECIPE uninterrupted`, and `RECIPE STRATEGY
    to STRATEGY`."""
    out = tmp_path_factory.mktemp("runs")
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "16", "--logger", "none"]
    same += ["--optimizer", "adam", "--log_interval", "4", "--trainer.limit_test_batches", "1"]
    flags: dict[Path, list[str]] = {}
    for recipe, strategy in RUNS:
        begin = [*same, "--weights", str(base), *RECIPES[recipe], "--max_steps"]
        flags[out / f"{recipe} {strategy}"] = [*begin, str(STEPS), "--strategy", strategy]
        flags[out / f"{recipe} uninterrupted"] = [*begin, str(MORE), "--strategy", "ddp"]
    for recipe, start, strategy in GONE_ON:
        go_on = [*same, *RECIPES[recipe], "--max_steps", str(MORE), "--resume", str(out / f"{recipe} {start}")]
        flags[out / f"{recipe} {start} to {strategy}"] = [*go_on, "--strategy", strategy]
    train_all(flags)
    return out


@pytest.mark.parametrize(("recipe", "strategy"), [run for run in RUNS if run[1] != "ddp"])
def test_ends_with_the_weights_of_ddp(recipe: str, strategy: str, out: Path):
    """The weights agree bit for bit, except with DeepSpeed's own Adam."""
    found, expected = (last_weights(out / f"{recipe} {name}") for name in (strategy, "ddp"))
    assert largest_difference(found, expected) <= (1e-4 if strategy.endswith("offload") else 0)


@pytest.mark.parametrize(("recipe", "strategy"), RUNS)
def test_trains_only_the_named_parameters(recipe: str, strategy: str, base: Path, out: Path):
    start, end = torch.load(base), last_weights(out / f"{recipe} {strategy}")
    assert end.keys() == start.keys() | TRAINED[recipe]
    for key, value in end.items():
        assert (key in TRAINED[recipe]) == (key not in start or not torch.equal(value, start[key])), key
    assert all(bool(end[key].any()) for key in TRAINED[recipe])  # B too is no longer zero
    metrics = metrics_of(out / f"{recipe} {strategy}")
    assert metrics["trained_parameters"] == sum(end[key].numel() for key in TRAINED[recipe])
    assert metrics["parameters"] == sum(value.numel() for value in end.values())


@pytest.mark.parametrize(("recipe", "start", "strategy"), GONE_ON)
def test_resumes_in_any_shape(recipe: str, start: str, strategy: str, out: Path):
    found, expected = (last_weights(out / f"{recipe} {name}") for name in (f"{start} to {strategy}", "uninterrupted"))
    assert largest_difference(found, expected) < 1e-6
