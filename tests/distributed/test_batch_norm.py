"""Networks with batch normalisation and drawn initial weights, on two real ranks under each kind of strategy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from checkpointing.read import read
from models.initialization import initialize
from tests.helpers import assert_ok, run_folder_of, run_program, train_all

pytestmark = pytest.mark.distributed

FUZZ = "FUZZ" in os.environ
STRATEGIES = ["ddp", *(f"deepspeed_stage_{stage}" for stage in (range(4) if FUZZ else (3,)))]
RESNET = ["--model", "resnet18", "--model.width", "0.0625", "--init", "he", "--optimizer.lr", "0.05"]
RESUMED = {"ddp": "deepspeed_stage_3", "deepspeed_stage_3": "ddp"}
RESUMED |= {"deepspeed_stage_0": "ddp", "deepspeed_stage_2": "deepspeed_stage_3"} if FUZZ else {}
"""Strategy that goes on, and whose checkpoint it takes up."""

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> Path:
    """Runs of all strategies for STEPS, two that go on from another's checkpoint, and one that only starts."""
    out = tmp_path_factory.mktemp("runs")
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "16", "--data.val_fraction", "0"]
    same += ["--data.synthetic_size", "160"]
    steps = ["--max_steps", str(STEPS)]
    runs = {out / name: [*same, *RESNET, *steps, "--strategy", name] for name in STRATEGIES}
    for name, before in RESUMED.items():
        resume = ["--resume", str(out / before), "--max_steps", str(STEPS + 2)]
        runs[out / f"{name}-resumed"] = [*same, *RESNET, *resume, "--strategy", name]
    vgg = ["--model", "vgg16", "--model.width", "0.03", "--init", "he", "--optimizer.lr", "0", "--max_steps", "1"]
    runs[out / "vgg16"] = [*same, *vgg, "--strategy", "deepspeed_stage_3"]
    other = ["--model", "torchvision:squeezenet1_1", "--optimizer.lr", "0", "--max_steps", "1"]
    runs[out / "torchvision"] = [*same, *other, "--strategy", "deepspeed_stage_3"]
    train_all(runs)
    return out


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("net."): value
        for name, value in read(run_folder_of(folder) / "checkpoints" / "last.ckpt")["state_dict"].items()
    }


def start_of(name: str, init: str, **options: Any) -> dict[str, torch.Tensor]:
    """What one process starts from with seed 0."""
    torch.manual_seed(0)
    net = models.build(name, 10, **options)
    torch.manual_seed(0)
    initialize(net, init, 0)
    return dict(net.state_dict())


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_ends_with_the_weights_and_statistics_of_ddp(strategy: str, folder: Path):
    expected = state_of(folder / "ddp")
    assert_equal(state_of(folder / strategy), expected)
    assert expected["bn1.num_batches_tracked"].dtype == torch.int64
    assert expected["bn1.num_batches_tracked"] == STEPS
    assert not torch.equal(expected["bn1.running_mean"], torch.zeros(4))


def test_every_rank_has_the_statistics_of_all_images(folder: Path):
    files = run_folder_of(folder / "deepspeed_stage_3").rglob("last.ckpt/*/*model_states.pt")
    one, other = (torch.load(file, weights_only=False)["module"] for file in files)
    statistics = [name for name in one if "running" in name]
    assert len(statistics) == 40
    assert all(torch.equal(one[name], other[name]) for name in statistics)


@pytest.mark.parametrize("strategy", RESUMED)
def test_goes_on_from_the_checkpoint_of_another_strategy(strategy: str, folder: Path):
    """Four steps of stage 3 and two of DDP are the same six as four of DDP and two of stage 3."""
    found = state_of(folder / f"{strategy}-resumed")
    assert found["bn1.num_batches_tracked"] == STEPS + 2
    assert_equal(found, state_of(folder / f"{'ddp' if strategy != 'ddp' else 'deepspeed_stage_3'}-resumed"))


@pytest.mark.parametrize("run", ["vgg16", "torchvision"])
def test_stage_3_starts_from_the_weights_of_one_process(run: str, folder: Path):
    """Drawn by --init, or once more by a network that has all of its layers; with a learning rate of 0."""
    vgg = start_of("vgg16", "he", width=0.03)
    expected = vgg if run == "vgg16" else start_of("torchvision:squeezenet1_1", "default")
    found = state_of(folder / run)
    assert_equal(
        {name: value for name, value in found.items() if name.endswith((".weight", ".bias"))},
        {name: value for name, value in expected.items() if name.endswith((".weight", ".bias"))},
    )


@pytest.mark.skipif(not FUZZ, reason="make fuzz")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluate_and_export_do_what_the_run_did(strategy: str, folder: Path):
    run = run_folder_of(folder / strategy)
    metrics = json.loads((run / "metrics.json").read_text())
    done = run_program("evaluate.py", str(run), "--accelerator", "cpu")
    assert_ok(done)
    assert f"test loss {metrics['test/loss']:.4f}" in done.stdout
    done = run_program("export.py", str(run), "--to", "safetensors")
    assert_ok(done)
    assert "for each of 160 images" in done.stdout
