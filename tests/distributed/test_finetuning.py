"""Training a part of the model, or adapters, on two real ranks: the same under every strategy, the rest unchanged.

`make test-all` runs every stage, experts that are spread over ranks, and more ways to resume.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cifar_zero import models
from tests.support.helpers import WHOLE, last_weights, metrics_of, train_all

pytestmark = pytest.mark.distributed


RECIPES = {
    "lora": ["--lora.rank", "2", "--lora.target", "fc1", "fc2", "--trainable", "fc3.*"],
    "part": ["--trainable", "conv2.*", "fc3.bias"],
    "experts": ["--model", "net_moe", "--model.num_experts", "[2]", "--model.top_k", "2", "--trainable", "*.experts.*"],
}
TRAINED = {
    "lora": {"fc1.lora_a", "fc1.lora_b", "fc2.lora_a", "fc2.lora_b", "fc3.weight", "fc3.bias"},
    "part": {"conv2.weight", "conv2.bias", "fc3.bias"},
    "experts": {f"fc3.0.experts.{number}.{name}" for number in range(2) for name in ("weight", "bias")},
}
RUNS: dict[str, list[str]] = {"lora ddp": [], "lora deepspeed_stage_3": []}
"""Additional flags, by recipe and strategy."""

GONE_ON = [("lora deepspeed_stage_3", "ddp")]
"""The run that is resumed, and the strategy that resumes it."""

if WHOLE:
    STAGES = [f"deepspeed_stage_{stage}" for stage in range(4)]
    RUNS |= {"part ddp": []}
    GONE_ON += [("lora deepspeed_stage_3", "deepspeed_stage_3")]
    RUNS |= {f"{recipe} {stage}": [] for recipe in ("lora", "part") for stage in STAGES}
    RUNS |= {"part deepspeed_stage_3_offload": []}
    RUNS |= {"experts ddp": [], "experts deepspeed_stage_2": ["--model.ep_size", "2"]}
    GONE_ON += [("part ddp", stage) for stage in STAGES] + [(f"part {stage}", stage) for stage in STAGES]
    GONE_ON += [("lora deepspeed_stage_1", "deepspeed_stage_3"), ("experts deepspeed_stage_2", "ddp")]
    GONE_ON += [("experts ddp", "deepspeed_stage_1")]

STEPS, MORE = 8, 14


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The starting weights of each recipe; no run of seed 0 would draw them."""
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(1)
    torch.save(models.build("net", 10).state_dict(), folder / "net.pt")
    torch.save(models.build("net_moe", 10, num_experts=[2]).state_dict(), folder / "net_moe.pt")
    return {recipe: folder / ("net_moe.pt" if recipe == "experts" else "net.pt") for recipe in RECIPES}


@pytest.fixture(scope="module")
def runs(bases: dict[str, Path], small_data: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs")
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "16", "--logger", "none"]
    same += ["--optimizer", "adam", "--log_interval", "4", "--trainer.limit_test_batches", "1"]
    flags: dict[Path, list[str]] = {}
    for name, more in RUNS.items():
        recipe, strategy = name.split()
        begin = [*same, "--weights", str(bases[recipe]), *RECIPES[recipe], "--max_steps"]
        flags[out / name] = [*begin, str(STEPS), "--strategy", strategy, *more]
        flags[out / f"{recipe} uninterrupted"] = [*begin, str(MORE), "--strategy", "ddp"]
    for start, strategy in GONE_ON:
        recipe = start.split()[0]
        go_on = [*same, "--resume", str(out / start), *RECIPES[recipe], "--max_steps", str(MORE)]
        flags[out / f"{start} to {strategy}"] = [*go_on, "--strategy", strategy]
    train_all(flags)
    return {folder.name: folder for folder in flags}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol)


@pytest.mark.parametrize("name", [name for name in RUNS if not name.endswith("ddp")])
def test_ends_with_the_weights_of_ddp(name: str, runs: dict[str, Path]):
    """Bit for bit, except with DeepSpeed's own Adam and with experts, whose gradients are summed in another order."""
    tolerance = 1e-4 if name.endswith("offload") else 1e-6 if name.startswith("experts") else 0
    assert_close(last_weights(runs[name]), last_weights(runs[f"{name.split()[0]} ddp"]), tolerance)


@pytest.mark.parametrize("name", RUNS)
def test_trains_only_the_named_parameters(name: str, bases: dict[str, Path], runs: dict[str, Path]):
    recipe = name.split()[0]
    start, end = torch.load(bases[recipe]), last_weights(runs[name])
    assert end.keys() == start.keys() | TRAINED[recipe]
    for key, value in end.items():
        assert (key in TRAINED[recipe]) == (key not in start or not torch.equal(value, start[key])), key
    assert all(bool(end[key].any()) for key in TRAINED[recipe])  # B too is no longer zero
    metrics = metrics_of(runs[name])
    assert metrics["trained_parameters"] == sum(end[key].numel() for key in TRAINED[recipe])
    assert metrics["parameters"] == sum(value.numel() for value in end.values())


@pytest.mark.parametrize(("start", "strategy"), GONE_ON)
def test_resumes_in_any_shape(start: str, strategy: str, runs: dict[str, Path]):
    expected = last_weights(runs[f"{start.split()[0]} uninterrupted"])
    assert_close(last_weights(runs[f"{start} to {strategy}"]), expected, atol=1e-6)
