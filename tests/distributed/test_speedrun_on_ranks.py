"""The recipe of the speed records on two real ranks ends with the same weights under each strategy that can run it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.helpers import largest_difference, last_weights, of_test_all, train_all

STRATEGIES = {"muon_sgd": ("ddp", "deepspeed_stage_0"), "sgd": ("ddp", "deepspeed_stage_3")}
"""The strategies of each optimizer. Muon needs whole tensors. The model and its computed first layer also run under
ZeRO 3."""


@of_test_all
@pytest.mark.distributed
@pytest.mark.parametrize("optimizer", STRATEGIES)
def test_strategies_agree_and_the_first_layer_whitens(optimizer: str, tmp_path: Path, small_data: list[str]):
    """Both strategies compute the filters of the first layer from the same images, and the filters stay fixed."""
    same = ["--config", "configs/speedrun.yaml", *small_data, "--accelerator", "cpu", "--precision", "32-true"]
    same += ["--devices", "2", "--model.width", "0.05", "--batch_size", "64", "--epochs", "1", "--max_steps", "8"]
    same += ["--logger", "none", "--trainer.limit_test_batches", "1", "--schedule.total_steps", "8"]
    same += ["--optimizer", optimizer]
    train_all({tmp_path / name: [*same, "--strategy", name] for name in STRATEGIES[optimizer]})
    one, other = (last_weights(tmp_path / name) for name in STRATEGIES[optimizer])
    assert largest_difference(one, other) == 0
    assert torch.equal(one["whiten.weight"][12:], -one["whiten.weight"][:12])
