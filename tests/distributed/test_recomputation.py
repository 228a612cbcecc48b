"""Activation checkpointing through train.py on two real ranks keeps losses and weights bit for bit, also where every
layer is sharded and gathered again for the second forward pass. `make fuzz` has every stage, and experts whose tokens
are sent a second time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.helpers import WHOLE, last_weights, run_folder_of, train_all

pytestmark = pytest.mark.distributed

RECIPES = {
    "ddp": "--strategy ddp --model vit_tiny --batch_size 8 --accumulate 2 --max_steps 10",
    "every layer sharded": "--ds_config {everything} --model vit_tiny --batch_size 8 --accumulate 2 --max_steps 10",
}
if WHOLE:
    names = [*(f"deepspeed_stage_{stage}" for stage in range(4)), "deepspeed_stage_3_offload"]
    RECIPES |= {name: f"--strategy {name} --model vit_tiny --batch_size 8 --max_steps 20" for name in names}
    experts = "--model vit_moe --model.ep_size 2 --batch_size 4 --max_steps 4"
    RECIPES["experts spread"] = f"--strategy deepspeed_stage_2 {experts}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """The run folders of each recipe, without and with --activation_checkpointing."""
    folder = tmp_path_factory.mktemp("runs")
    everything = folder / "everything.json"
    everything.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    same = ["--data.source", "synthetic", "--data.synthetic_size", "160", "--data.root", str(folder)]
    same += ["--data.val_fraction", "0", "--accelerator", "cpu", "--devices", "2", "--log_interval", "1"]
    same += ["--optimizer.lr", "0.01"]
    flags: dict[Path, list[str]] = {}
    out: dict[str, list[Path]] = {}
    for name, recipe in RECIPES.items():
        out[name] = [folder / f"{name}-{switch}" for switch in ("plain", "checkpointed")]
        own = recipe.format(everything=everything).split()
        flags |= dict(
            zip(out[name], ([*same, *own, *more] for more in ([], ["--activation_checkpointing"])), strict=True)
        )
    train_all(flags)
    return {name: [run_folder_of(path) for path in paths] for name, paths in out.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_losses_and_weights_stay_the_same(name: str, runs: dict[str, list[Path]]) -> None:
    losses, weights = zip(*map(losses_and_weights, runs[name]), strict=True)
    assert len(losses[0]) > 1
    assert losses[0] == losses[1]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def losses_and_weights(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    events = EventAccumulator(str(folder)).Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    return losses, last_weights(folder)
