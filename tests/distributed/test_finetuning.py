"""Training a part of the network, or adapters, on two real ranks: the same under every strategy, the rest untouched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import models
import run_folder
from checkpointing.read import read
from checkpointing.weights import network, plain_network
from finetuning.delta import together, write
from tests.helpers import run_folder_of, train_all

pytestmark = pytest.mark.distributed

WHOLE = "FUZZ" in os.environ

LORA = ["--lora.rank", "2", "--lora.target", "fc1", "fc2", "--trainable", "fc3.*"]
PART = ["--trainable", "conv2.*", "fc3.bias"]
RUNS = {
    "lora": ("ddp", LORA),
    "lora 3": ("deepspeed_stage_3", LORA),
    "part": ("ddp", PART),
    "part 2": ("deepspeed_stage_2", PART),
}
GONE_ON = {"lora 3 to 3": ("lora 3", "deepspeed_stage_3"), "lora 3 to ddp": ("lora 3", "ddp")}
if WHOLE:
    RUNS |= {f"lora {stage}": (f"deepspeed_stage_{stage}", LORA) for stage in range(4)}
    RUNS |= {f"part {stage}": (f"deepspeed_stage_{stage}", PART) for stage in range(4)}
    RUNS |= {"part offload 3": ("deepspeed_stage_3_offload", PART)}
    RUNS |= {f"rounded {stage}": (f"deepspeed_stage_{stage}", [*LORA, *ROUNDED]) for stage in range(4)}
    RUNS |= {"experts": ("ddp", EXPERTS), "experts 2": ("deepspeed_stage_2", [*EXPERTS, "--model.ep_size", "2"])}
    GONE_ON |= {f"part to {stage}": ("part", f"deepspeed_stage_{stage}") for stage in range(4)}
    GONE_ON |= {f"part {stage} to {stage}": (f"part {stage}", f"deepspeed_stage_{stage}") for stage in range(4)}
    GONE_ON |= {"lora 1 to 3": ("lora 1", "deepspeed_stage_3"), "experts 2 to ddp": ("experts 2", "ddp")}
STEPS, MORE = 8, 14
TRAINED = {
    "lora": {"fc1.lora_a", "fc1.lora_b", "fc2.lora_a", "fc2.lora_b", "fc3.weight", "fc3.bias"},
    "part": {"conv2.weight", "conv2.bias", "fc3.bias"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that no run of seed 0 would start from."""
    file = tmp_path_factory.mktemp("base") / "net.pt"
    torch.manual_seed(1)
    torch.save(models.build("net", 10).state_dict(), file)
    return file


@pytest.fixture(scope="module")
def runs(base: Path, small_data: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs")
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "16", "--logger", "none"]
    same += ["--optimizer", "adam"]
    begin = ["--weights", str(base), "--max_steps", str(STEPS)]
    flags = {out / name: [*same, *begin, "--strategy", of, *more] for name, (of, more) in RUNS.items()}
    long = ["--weights", str(base), "--max_steps", str(MORE), "--strategy"]
    for kind, recipe in (("lora", LORA), ("part", PART)):
        flags[out / f"long {kind}"] = [*same, *long, "ddp", *recipe]
    for name, (start, strategy) in GONE_ON.items():
        go_on = ["--resume", str(out / start), "--max_steps", str(MORE), "--strategy", strategy]
        flags[out / name] = [*same, *go_on, *RUNS[start][1]]
    train_all(flags)
    return {folder.name: run_folder_of(folder) for folder in flags}


def weights(run: Path) -> dict[str, Tensor]:
    return network(read(run_folder.newest_checkpoint(run)))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", [name for name in RUNS if name[-1].isdigit() and not name.startswith("rounded")])
def test_ends_with_the_weights_of_ddp(name: str, runs: dict[str, Path]):
    assert_close(weights(runs[name]), weights(runs[name.split()[0]]), atol=0)


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("rounded")])
def test_trains_what_is_named_and_nothing_else(name: str, base: Path, runs: dict[str, Path]):
    start, end = torch.load(base), weights(runs[name])
    trained = TRAINED[name.split()[0]]
    assert end.keys() == start.keys() | trained
    for key, value in end.items():
        assert (key in trained) == (key not in start or not torch.equal(value, start[key])), key
    assert all(bool(value.any()) for key, value in end.items() if key in trained)
    metrics = json.loads((runs[name] / run_folder.METRICS).read_text())
    assert metrics["trained_parameters"] == sum(end[key].numel() for key in trained)
    assert metrics["parameters"] == sum(value.numel() for value in end.values())


@pytest.mark.parametrize("name", GONE_ON)
def test_goes_on_in_any_shape(name: str, runs: dict[str, Path]):
    assert_close(weights(runs[name]), weights(runs[f"long {name.split()[0]}"]), atol=1e-6)


@pytest.mark.parametrize("name", ["lora 3", "part 0", "rounded 3"])
def test_a_delta_and_its_base_are_the_checkpoint(name: str, base: Path, runs: dict[str, Path], tmp_path: Path):
    checkpoint = read(run_folder.newest_checkpoint(runs[name]))
    written = write(checkpoint, tmp_path / "delta.safetensors", "last.ckpt")
    assert {*written} == TRAINED["part" if name.startswith("part") else "lora"]
    again = together(base, tmp_path / "delta.safetensors")
    assert_close(network(again), network(checkpoint), atol=0)
    assert_close(plain_network(again), plain_network(checkpoint), atol=0)
