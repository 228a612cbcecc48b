"""The recipe of the speed records on two real ranks ends with the same weights under DDP and ZeRO 3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.helpers import largest_difference, last_weights, of_test_all, train_all


@of_test_all
@pytest.mark.distributed
def test_zero_3_agrees_with_ddp_and_the_first_layer_whitens(tmp_path: Path, small_data: list[str]):
    """Both strategies compute the filters of the first layer from the same images, and the filters stay fixed. The
    optimizer is not the recipe's Muon, which needs whole tensors."""
    same = ["--config", "configs/speedrun.yaml", *small_data, "--accelerator", "cpu", "--precision", "32-true"]
    same += ["--devices", "2", "--model.width", "0.05", "--batch_size", "64", "--epochs", "1", "--max_steps", "8"]
    same += ["--logger", "none", "--trainer.limit_test_batches", "1", "--schedule.total_steps", "8"]
    same += ["--optimizer", "sgd", "--strategy"]
    train_all({tmp_path / name: [*same, name] for name in ("ddp", "deepspeed_stage_3")})
    one, other = (last_weights(tmp_path / name) for name in ("ddp", "deepspeed_stage_3"))
    assert largest_difference(one, other) == 0
    assert torch.equal(one["whiten.weight"][12:], -one["whiten.weight"][:12])
