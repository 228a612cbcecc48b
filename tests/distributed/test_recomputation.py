"""Checks that activation checkpointing in train.py on two real ranks keeps losses and weights bit for bit, even if
every layer is sharded and gathered again for the second forward pass, or tokens are sent to experts a second time."""

import json
from pathlib import Path

import pytest

from tests.distributed.changes import small_vit
from tests.support.helpers import largest_difference, last_weights, losses, of_test_all, train_all

pytestmark = [pytest.mark.distributed, of_test_all]

STRATEGIES = ("ddp", "deepspeed_stage_0", "deepspeed_stage_2", "deepspeed_stage_3_offload")
RECIPES = {name: f"--strategy {name} --model vit_tiny --batch_size 8 --max_steps 20" for name in STRATEGIES}
RECIPES |= {
    "every layer sharded": "--ds_config {everything} --model vit_tiny --batch_size 8 --accumulate 2 --max_steps 10",
    "experts spread": "--strategy deepspeed_stage_2 --model vit_moe --model.ep_size 2 --batch_size 4 --max_steps 4",
}


@pytest.mark.parametrize("name", RECIPES)
def test_losses_and_weights_stay_the_same(name: str, tmp_path: Path):
    everything = tmp_path / "everything.json"
    everything.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    flags = "--data.source synthetic --data.synthetic_size 160 --data.val_fraction 0 --accelerator cpu --devices 2"
    flags += f" --log_interval 1 --optimizer.lr 0.01 --data.root {tmp_path} {RECIPES[name]}"
    same, plain, checkpointed = flags.format(everything=everything).split(), tmp_path / "plain", tmp_path / "checked"
    train_all({plain: same, checkpointed: [*same, "--activation_checkpointing"]}, small_vit)
    assert len(losses(plain)) > 1
    assert losses(checkpointed) == losses(plain)
    assert largest_difference(last_weights(checkpointed), last_weights(plain)) == 0
