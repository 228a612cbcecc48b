"""Strategies that split the model: fsdp2, tensor_parallel, pipeline and their combinations with data parallelism, on
four real ranks, resume each other's checkpoints and end with DDP's weights.

With `FUZZ` set, 50 steps of each are compared with one device.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.read import read
from tests.support.helpers import of_make_fuzz, run_folder_of, train_all

pytestmark = pytest.mark.distributed

COMBINED = [
    "fsdp2 --tensor_parallel_size 2",
    "tensor_parallel --tensor_parallel_size 2",
    "pipeline --pipeline_parallel_size 2",
]
"""Two groups of ranks compute different images, two ranks of each the same."""

RELAYS = {"sgd": ["ddp", "fsdp2", "tensor_parallel", "pipeline", "ddp"], "adamw": ["ddp", *COMBINED, "ddp"]}
"""By optimizer: each resumes the one before and takes one step."""

SIZE = ["--data.source", "synthetic", "--data.synthetic_size", "64", "--data.val_fraction", "0", "--accelerator", "cpu"]
RECIPE = [*SIZE, "--batch_size", "8", "--gradient_clip_val", "0.5", "--log_interval", "1"]
RECIPE += ["--optimizer.weight_decay", "0.01"]  # which makes two groups of parameters

# Adam divides each gradient by its size: a larger eps keeps the rounding of the smallest ones small.
OPTIMIZERS = {"sgd": ["--optimizer.lr", "0.05"], "adamw": ["--optimizer.lr", "0.005", "--optimizer.eps", "1e-4"]}


def finished(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest checkpoint, and metrics.json, of the only run under a folder."""
    run = run_folder_of(out)
    return read(run_folder.newest_checkpoint(run)), json.loads((run / "metrics.json").read_text())


def largest_difference(one: Any, other: Any) -> float:
    """Returns the largest difference of weights and momentum; both have the same names in the same order."""
    assert [*one["state_dict"]] == [*other["state_dict"]]
    pairs = [*zip(one["state_dict"].values(), other["state_dict"].values(), strict=True)]
    states = [checkpoint["optimizer_states"][0] for checkpoint in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for number, entry in states[0]["state"].items():
        pairs += [(entry[key], states[1]["state"][number][key]) for key in entry]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=of_make_fuzz)])
def test_a_run_resumed_by_each_strategy_in_turn_ends_as_under_ddp(optimizer: str, tmp_path: Path):
    """Clipping is active, so every norm must be over all ranks. Micro-batches differ; the global batch does not."""
    relay = RELAYS[optimizer]
    same = [*RECIPE, "--optimizer", optimizer, *OPTIMIZERS[optimizer], "--model", "vit_tiny", "--devices", "4"]
    same += ["--data.root", str(tmp_path / "data")]
    outs = [tmp_path / str(number) for number in range(len(relay))]
    runs = {tmp_path / "whole": [*same, "--strategy", "ddp", "--max_steps", str(len(relay))]}
    for number, (out, name) in enumerate(zip(outs, relay, strict=True)):
        before = ["--resume", str(outs[number - 1])] if number else []
        accumulate = ["--accumulate", "2"] if "tensor_parallel" in name else []
        runs[out] = [*same, *before, *accumulate, "--strategy", *name.split(), "--max_steps", str(number + 1)]
    train_all(runs, program="tests.support.small_vit_runs")

    (whole, expected), (ended, found) = finished(tmp_path / "whole"), finished(outs[-1])
    assert ended["global_step"] == whole["global_step"] == len(relay)
    assert largest_difference(ended, whole) < 1e-5
    assert found["test/loss"] == pytest.approx(expected["test/loss"], abs=1e-5)
    for out, name in zip(outs[1:-1], relay[1:-1], strict=True):
        content, metrics = finished(out)
        assert {type(value) for value in content["state_dict"].values()} == {torch.Tensor}, name
        assert metrics["num_test"] == 64
        # At most norms, patches and positions are whole on every rank: a tenth of so small a model.
        replicas = 2 if name in COMBINED[1:] else 1
        assert sum(metrics["mem/model_state_rank_bytes"]) < 1.15 * replicas * expected["mem/model_state_rank_bytes"][0]


@pytest.mark.skipif("FUZZ" not in os.environ, reason="minutes")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("model", "ranks", "strategies"),
    [
        ("net", 2, ["fsdp2", "deepspeed_stage_3"]),
        ("vit_tiny", 2, ["fsdp2", "deepspeed_stage_3", "pipeline"]),
        ("vit_small", 2, ["tensor_parallel"]),
        ("vit_small", 4, ["fsdp2", "deepspeed_stage_3", "pipeline", *COMBINED]),
    ],
)
def test_fifty_steps_as_on_one_device(model: str, ranks: int, strategies: list[str], tmp_path: Path):
    same = [*SIZE, "--data.synthetic_size", "100", "--batch_size", "4", "--max_steps", "50", "--log_interval", "10"]
    same += ["--optimizer.lr", "0.01", "--gradient_clip_val", "0.5", "--model", model, "--data.root", str(tmp_path)]
    train_all({tmp_path / "one": [*same, "--devices", "1"]}, timeout=3600)
    runs = {tmp_path / name: [*same, "--devices", str(ranks), "--strategy", *name.split()] for name in strategies}
    train_all(runs, timeout=3600)
    one, _ = finished(tmp_path / "one")
    assert one["global_step"] == 50
    for name in strategies:
        ended, _ = finished(tmp_path / name)
        pairs = zip(one["state_dict"].items(), ended["state_dict"].values(), strict=True)
        difference = max((weight - other).abs().max().item() for (_, weight), other in pairs)
        print(f"{model} {name}, {ranks} ranks: {difference:.1e}")
        assert difference < 1e-5
