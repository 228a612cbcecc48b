"""The recipe of the speed records on two real ranks ends with the same weights under each strategy that can run it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cifar_zero.checkpoints.weights import network
from tests.support.helpers import largest_difference, last_checkpoint, run_folder_of, train_all

pytestmark = pytest.mark.distributed

STRATEGIES = {"muon_sgd": ("ddp", "deepspeed_stage_0"), "sgd": ("ddp", "deepspeed_stage_3")}
"""Muon needs whole tensors; the model and its computed first layer run under ZeRO-3 too."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The last checkpoint under each strategy, by optimizer."""
    folder = tmp_path_factory.mktemp("speedrun")
    same = ["--config", "configs/speedrun.yaml", *small_data, "--accelerator", "cpu", "--precision", "32-true"]
    same += ["--devices", "2", "--model.width", "0.05", "--batch_size", "64", "--epochs", "1", "--max_steps", "8"]
    same += ["--logger", "none", "--trainer.limit_test_batches", "1", "--schedule.total_steps", "8"]
    flags = {
        folder / f"{optimizer}-{strategy}": [*same, "--strategy", strategy, "--optimizer", optimizer]
        for optimizer, strategies in STRATEGIES.items()
        for strategy in strategies
    }
    train_all(flags)
    return {
        optimizer: [last_checkpoint(run_folder_of(folder / f"{optimizer}-{strategy}")) for strategy in strategies]
        for optimizer, strategies in STRATEGIES.items()
    }


@pytest.mark.parametrize("optimizer", STRATEGIES)
def test_strategies_agree(optimizer: str, runs: dict[str, list[dict[str, Any]]]):
    one, other = map(network, runs[optimizer])
    assert largest_difference(one, other) == 0


def test_the_first_layer_whitens_and_stays(runs: dict[str, list[dict[str, Any]]]):
    """Its filters are computed from the same images in all runs and stay fixed; its bias is trained."""
    of_all = [network(checkpoint) for pair in runs.values() for checkpoint in pair]
    filters = of_all[0]["whiten.weight"]
    assert torch.equal(filters[12:], -filters[:12])
    assert all(torch.equal(weights["whiten.weight"], filters) for weights in of_all)
    assert not torch.equal(of_all[0]["whiten.bias"], of_all[2]["whiten.bias"])
