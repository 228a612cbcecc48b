"""Tests models with batch normalisation on two real ranks under each kind of strategy."""

from pathlib import Path

import pytest
import torch

from cifar_zero.checkpoints.weights import net_weights
from cifar_zero.checkpoints.zero_folder import AVERAGE
from tests.support.helpers import WHOLE, last_checkpoint, last_weights, of_test_all, run_folder_of, train_all

pytestmark = pytest.mark.distributed

CHAIN = ["deepspeed_stage_3", "ddp"]
if WHOLE:
    CHAIN += ["deepspeed_stage_0", "deepspeed_stage_3", "deepspeed_stage_2", "ddp"]
"""Each strategy resumes the checkpoint of the one before and takes one optimizer step."""

CAST = ["deepspeed_stage_3", "fsdp2"]
"""Strategies whose mixed precision casts the model to bfloat16."""

RESNET = ["--model", "resnet18", "--model.width", "0.125", "--init", "he", "--optimizer.lr", "0.05"]
ALL = ["--data.synthetic_size", "160", "--data.val_fraction", "0", "--accelerator", "cpu"]
ALL += ["--devices", "2", "--batch_size", "16", "--trainer.limit_test_batches", "1"]
AVERAGED = [*RESNET, "--ema", "0.9", "--max_steps", "1", "--strategy", "deepspeed_stage_3"]
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
    for strategy in ("ddp", *CAST) if WHOLE else ():
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


@of_test_all
@pytest.mark.parametrize("strategy", CAST)
def test_statistics_stay_in_float32_where_the_model_is_cast(strategy: str, folder: Path):
    # Stage 3 starts from rounded weights.
    differ = differing(last_weights(folder / f"bfloat16 {strategy}"), last_weights(folder / "bfloat16 ddp"))
    assert not any("running" in name for name in differ)


def test_averages_have_the_statistics_of_all_ranks(folder: Path):
    """After one step the average is the model itself, whose statistics are the mean over the ranks."""
    checkpoint = last_checkpoint(folder / "averaged")
    assert checkpoint[AVERAGE]["count"] == 1
    assert not differing(net_weights(checkpoint), net_weights(checkpoint, averaged=False))
