"""Tests averaged weights and early stopping in train.py on two ranks. They are the same under every strategy and exact
after a resume, and evaluate and export use the average. `make test-all` adds strategies."""

from pathlib import Path
from typing import Any

import pytest

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
