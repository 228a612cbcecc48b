"""Tests averaged weights, early stopping and the statistics of batch norms in train.py on two ranks. They are the same
under every strategy and after a resume, and evaluate and export use the average. `make test-all` adds strategies."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_zero.checkpoints.weights import net_weights, read_safetensors
from cifar_zero.checkpoints.zero_folder import AVERAGE
from cifar_zero.config.arguments import read_arguments
from cifar_zero.exporting import formats
from cifar_zero.training import evaluate
from tests.support.helpers import (
    WHOLE,
    largest_difference,
    last_checkpoint,
    last_weights,
    metrics_of,
    of_test_all,
    run_folder_of,
    train_all,
)

pytestmark = pytest.mark.distributed

RECIPE = [
    *("--batch_size", "64", "--accelerator", "cpu", "--devices", "2", "--epochs", "5", "--logger", "none"),
    *("--optimizer.lr", "0.1", "--label_smoothing", "0.1", "--early_stopping", "1", "--seed", "1"),
]
"""An epoch has 9 steps."""

EMA = ["--ema", "0.9"]
STAGE_3 = ["--strategy", "deepspeed_stage_3"]
STOPPED_AT = 13  # before early stopping could end the run
RUNS: dict[str, list[str]] = {
    "ddp": EMA,
    "stage 3": [*EMA, *STAGE_3],
    "stage 3, stopped": [*EMA, *STAGE_3, "--max_steps", str(STOPPED_AT)],
    "stage 3, continued": [*EMA, *STAGE_3, "--resume", "stage 3, stopped"],
}
SAME = [("stage 3", "ddp")]
if WHOLE:
    for name in ("stage_0", "stage_1_offload", "stage_2", "stage_3_offload"):
        RUNS |= {name: [*EMA, "--strategy", f"deepspeed_{name}"]}
        RUNS |= {f"{name}, continued": [*RUNS[name], "--resume", "stage 3, stopped"]}
        SAME += [(name, "ddp"), (f"{name}, continued", "ddp")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> dict[str, Path]:
    """Returns the output directory of each run."""
    folder = tmp_path_factory.mktemp("runs")
    out = {name: folder / name for name in RUNS}
    flags = {out[name]: [str(out.get(flag, flag)) for flag in flags] for name, flags in RUNS.items()}
    for name in RUNS.keys() - {"stage 3"}:
        flags[out[name]] += ["--trainer.limit_test_batches", "0"]
    train_all({path: [*small_data, *RECIPE, *more] for path, more in flags.items()})
    return out


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_average_is_the_same_under_every_strategy(one: str, other: str, runs: dict[str, Path]):
    mine, expected = last_checkpoint(runs[one]), last_checkpoint(runs[other])
    assert mine["global_step"] == expected["global_step"]
    assert mine[AVERAGE]["count"] == expected[AVERAGE]["count"]
    assert largest_difference(net_weights(mine), net_weights(expected)) < 1e-6
    assert largest_difference(net_weights(mine), net_weights(mine, averaged=False)) > 1e-3


def test_a_stopped_run_resumes_exactly(runs: dict[str, Path]):
    stopped, continued, whole = (last_checkpoint(runs[f"stage 3{how}"]) for how in (", stopped", ", continued", ""))
    assert (stopped["global_step"], stopped[AVERAGE]["count"]) == (STOPPED_AT, STOPPED_AT)
    assert continued["global_step"] == whole["global_step"]
    assert STOPPED_AT < whole["global_step"] < 5 * 9  # it ended early
    for averaged in (True, False):
        assert largest_difference(net_weights(continued, averaged), net_weights(whole, averaged)) == 0
    (key,) = (key for key in whole["callbacks"] if "EarlyStop" in key)
    assert continued["callbacks"][key] == whole["callbacks"][key]


def test_evaluate_and_export_use_the_average(runs: dict[str, Path], tmp_path: Path):
    """Both repeat the metrics of the run's test, which uses the average too."""
    checkpoint = run_folder_of(runs["stage 3"]) / "checkpoints" / "last.ckpt"
    loss = metrics_of(runs["stage 3"])["test/loss"]

    def tested(*flags: str) -> Any:
        return evaluate.evaluate(checkpoint, read_arguments(["--accelerator", "cpu", *flags]))

    assert tested()["test/loss"] == pytest.approx(loss, rel=1e-6)
    assert tested("--ema", "0")["test/loss"] != pytest.approx(loss, rel=1e-6)  # the newest weights
    file = tmp_path / "net.safetensors"
    formats.export(checkpoint, file, "safetensors")
    assert largest_difference(read_safetensors(file)[0], last_weights(runs["stage 3"])) == 0


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
