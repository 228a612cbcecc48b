"""Checks that activation checkpointing in train.py on two real ranks keeps losses and weights bit for bit, even if
every layer is sharded and gathered again for the second forward pass. `make test-all` adds strategies, and experts
whose tokens are sent a second time."""

import json
from pathlib import Path

import pytest

from tests.distributed.changes import small_vit
from tests.support.helpers import WHOLE, largest_difference, last_weights, losses, train_all

pytestmark = pytest.mark.distributed

RECIPES = {
    "every layer sharded": "--ds_config {everything} --model vit_tiny --batch_size 8 --accumulate 2 --max_steps 10",
}
if WHOLE:
    names = ["ddp", "deepspeed_stage_0", "deepspeed_stage_2", "deepspeed_stage_3_offload"]
    RECIPES |= {name: f"--strategy {name} --model vit_tiny --batch_size 8 --max_steps 20" for name in names}
    experts = "--model vit_moe --model.ep_size 2 --batch_size 4 --max_steps 4"
    RECIPES["experts spread"] = f"--strategy deepspeed_stage_2 {experts}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the runs of each recipe, `RECIPE plain` and `RECIPE checkpointed`."""
    folder = tmp_path_factory.mktemp("runs")
    everything = folder / "everything.json"
    everything.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    same = ["--data.source", "synthetic", "--data.synthetic_size", "160", "--data.root", str(folder)]
    same += ["--data.val_fraction", "0", "--accelerator", "cpu", "--devices", "2", "--log_interval", "1"]
    same += ["--optimizer.lr", "0.01"]
    flags: dict[Path, list[str]] = {}
    for name, recipe in RECIPES.items():
        flags[folder / f"{name} plain"] = [*same, *recipe.format(everything=everything).split()]
        flags[folder / f"{name} checkpointed"] = [*flags[folder / f"{name} plain"], "--activation_checkpointing"]
    train_all(flags, small_vit)
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_losses_and_weights_stay_the_same(name: str, runs: Path):
    plain, checkpointed = runs / f"{name} plain", runs / f"{name} checkpointed"
    assert len(losses(plain)) > 1
    assert losses(checkpointed) == losses(plain)
    assert largest_difference(last_weights(checkpointed), last_weights(plain)) == 0
