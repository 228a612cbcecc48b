"""Tests models with batch normalisation on two real ranks under each kind of strategy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import update_bn

from cifar_zero import data as sources
from cifar_zero.checkpoints.weights import net_weights
from cifar_zero.checkpoints.zero_folder import AVERAGE
from cifar_zero.config import command_line
from cifar_zero.data.augment import normalize
from cifar_zero.data.dataset import TrainOrder
from cifar_zero.models import MLP
from tests.support.helpers import WHOLE, last_checkpoint, last_weights, run_folder_of, train_all

pytestmark = pytest.mark.distributed

CHAIN = ["deepspeed_stage_3", "ddp"]
if WHOLE:
    CHAIN += ["deepspeed_stage_0", "deepspeed_stage_3", "deepspeed_stage_2", "ddp"]
"""Each strategy resumes the checkpoint of the one before and takes one optimizer step."""

CAST = ["deepspeed_stage_3", *(["fsdp2"] if WHOLE else [])]
"""Strategies whose mixed precision casts the model to bfloat16."""

RESNET = ["--model", "resnet18", "--model.width", "0.125", "--init", "he", "--optimizer.lr", "0.05"]
ALL = ["--data.synthetic_size", "160", "--data.val_fraction", "0", "--accelerator", "cpu"]
ALL += ["--devices", "2", "--batch_size", "16", "--trainer.limit_test_batches", "1"]
AVERAGED = ["--model", "mlp", "--model.hidden", "[16]", "--model.batch_norm", "true", "--optimizer.lr", "0.05"]
AVERAGED += ["--swa_from", "0.3", "--epochs", "2", "--strategy", "deepspeed_stage_3"]
STILL = [*RESNET, "--optimizer.lr", "0", "--max_steps", "4", "--precision", "bf16-mixed"]
"""With the learning rate 0, only the statistics change."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> Path:
    """Returns the folder of all runs. The runs of the chain are named by number. `whole` has as many steps as the
    chain, and `averaged` has averaged weights. Runs in mixed precision are named `bfloat16 STRATEGY`."""
    out = tmp_path_factory.mktemp("runs")
    same = [*small_data, *ALL]
    runs = {out / "whole": [*same, *RESNET, "--strategy", "ddp", "--max_steps", str(len(CHAIN))]}
    for number, strategy in enumerate(CHAIN):
        resume = ["--resume", str(out / str(number - 1))] if number else []
        runs[out / str(number)] = [*same, *RESNET, "--strategy", strategy, "--max_steps", str(number + 1), *resume]
    for strategy in ("ddp", *CAST):
        runs[out / f"bfloat16 {strategy}"] = [*same, *STILL, "--strategy", strategy]
    train_all({**runs, out / "averaged": [*same, *AVERAGED]})
    return out


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def test_every_strategy_resumes_the_weights_and_statistics_of_any_other(folder: Path):
    """All weights agree bit for bit. Statistics are rounded, because each run of the chain averages them over ranks."""
    whole, chained = last_weights(folder / "whole"), last_weights(folder / str(len(CHAIN) - 1))
    differ = differing(chained, whole)
    assert all("running" in name for name in differ)
    for name in differ:
        torch.testing.assert_close(chained[name], whole[name], rtol=1e-6, atol=1e-7)
    assert whole["bn1.num_batches_tracked"].dtype == torch.int64
    assert whole["bn1.num_batches_tracked"] == len(CHAIN)


def test_all_ranks_have_the_same_statistics(folder: Path):
    files = run_folder_of(folder / "0").rglob("last.ckpt/*/*model_states.pt")
    one, other = (torch.load(file, weights_only=False)["module"] for file in files)
    statistics = [name for name in one if "running" in name]
    assert len(statistics) == 40
    assert all(torch.equal(one[name], other[name]) for name in statistics)
    assert one["net.bn1.running_mean"].any()


@pytest.mark.parametrize("strategy", CAST)
def test_statistics_stay_in_float32_where_the_model_is_cast(strategy: str, folder: Path):
    # Stage 3 starts from rounded weights.
    differ = differing(last_weights(folder / f"bfloat16 {strategy}"), last_weights(folder / "bfloat16 ddp"))
    assert not any("running" in name for name in differ)


def test_averaged_weights_have_the_statistics_of_all_ranks_images(folder: Path, small_data: list[str]):
    """They are the mean of what torch's update_bn computes from each rank's micro-batches."""
    checkpoint = last_checkpoint(folder / "averaged")
    averaged, newest = net_weights(checkpoint), net_weights(checkpoint, averaged=False)
    assert checkpoint[AVERAGE]["count"] == 2
    data = command_line.parse([*small_data, "--data.synthetic_size", "160"]).data
    images = torch.from_numpy(np.array(sources.load(data, "synthetic").train_images)).permute(0, 3, 1, 2)
    states = []
    for rank in range(2):
        net = MLP([16], batch_norm=True).build(10)
        net.load_state_dict(averaged)
        update_bn((normalize(images[rows]) for rows in TrainOrder(160, 16, 1, 2, rank, 0).positions()), net)
        states.append(net.state_dict())
    for name in ("2.running_mean", "2.running_var"):
        torch.testing.assert_close(averaged[name], (states[0][name] + states[1][name]) / 2, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(averaged[name], newest[name], rtol=1e-3, atol=1e-3)
        assert not torch.allclose(states[0][name], states[1][name], rtol=1e-3, atol=1e-3)
