"""Trains mixtures of experts with train.py on real ranks, with and without expert parallelism, under every strategy
that supports them. They end with the same weights, and are saved and tested. test_resume.py resumes them."""

from pathlib import Path

import pytest
import torch

from cifar_zero import models
from cifar_zero.checkpoints.read import RECORD
from cifar_zero.config.arguments import read_arguments
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

Run = tuple[str, str, int, int]
"""The recipe, strategy, number of ranks and ep_size of a run."""

SAME = ["--model", "net_moe", "--accelerator", "cpu", "--batch_size", "16", "--max_steps", "50"]
SAME += ["--log_interval", "10", "--logger", "none", "--data.val_fraction", "0"]
RECIPES = {
    "pr_moe": ["--model.num_experts", "[4, 8]", "--model.mlp_type", "residual", "--model.noisy_gate_policy", "RSample"],
    "top 2": ["--model.num_experts", "[4]", "--model.top_k", "2", "--model.noisy_gate_policy", "Jitter"],
}
RECIPES["pr_moe"] += ["--optimizer.lr", "0.05"]
# Fewer steps, because Adam amplifies the rounding error of small gradients until a token is routed to another expert.
RECIPES["top 2"] += ["--model.eval_capacity_factor", "1.5"]
RECIPES["top 2"] += ["--optimizer", "adam", "--accumulate", "2", "--max_steps", "12"]
RECIPES["top 2"] += ["--optimizer.weight_decay", "0.01"]
# The limit is far below the norm of any step's gradient, so that every update depends on the norm over all experts.
for flags in RECIPES.values():
    flags += ["--gradient_clip_val", "0.1"]

RUNS: list[Run] = [("top 2", "ddp", 2, 1), ("top 2", "deepspeed_stage_2", 2, 2)]
if WHOLE:
    RUNS = []
    for recipe in RECIPES:
        RUNS += [(recipe, "baseline", 1, 1), (recipe, "ddp", 2, 1), (recipe, "ddp", 4, 1)]
        for stage in ("0", "1", "2", "1_offload", "2_offload"):
            RUNS += [(recipe, f"deepspeed_stage_{stage}", *shape) for shape in ((1, 1), (2, 1), (2, 2), (4, 2))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> dict[Run, Path]:
    """Returns the output directory of each run."""
    folder = tmp_path_factory.mktemp("runs")
    out = {run: folder / "-".join(map(str, run)) for run in RUNS}
    flags: dict[Path, list[str]] = {}
    for recipe, strategy, ranks, ep_size in RUNS:
        where = ["--strategy", strategy, "--devices", str(ranks), "--model.ep_size", str(ep_size)]
        flags[out[recipe, strategy, ranks, ep_size]] = [*small_data, *SAME, *RECIPES[recipe], *where]
    train_all(flags)
    return out


@pytest.mark.parametrize("run", [run for run in RUNS if "deepspeed" in run[1]], ids=str)
def test_ends_with_the_weights_of_plain_pytorch(run: Run, runs: dict[Run, Path]):
    """Gate noise, token drops, accumulation and clipping are on. A rank draws the same noise under every strategy."""
    recipe, _, ranks, _ = run
    expected = last_weights(runs[recipe, "ddp" if ranks > 1 else "baseline", ranks, 1])
    assert largest_difference(last_weights(runs[run]), expected) < (1e-4 if recipe == "top 2" else 1e-5)
    torch.manual_seed(0)
    options = last_checkpoint(runs[run])[RECORD]["config"]["model"]["options"]
    start = dict(models.build("net_moe", 10, **options).state_dict())
    assert all(not torch.equal(expected[key], start[key]) for key in start if ".experts." in key)  # all were trained


def test_the_plain_model_repeats_the_metrics_of_the_spread_one(runs: dict[Run, Path]):
    """evaluate uses the experts of all ranks."""
    run = run_folder_of(runs["top 2", "deepspeed_stage_2", 2, 2])
    metrics = metrics_of(run)
    actual = evaluate.evaluate(run / "checkpoints" / "last.ckpt", read_arguments(["--accelerator", "cpu"]))
    assert actual["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-4)
    assert metrics["parameters"] == sum(value.numel() for value in last_weights(run).values())
