"""Trains mixtures of experts with train.py on real ranks, with and without expert parallelism, under every strategy
that supports them. They end with the same weights, and are saved, resumed and tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    losses,
    metrics_of,
    run_folder_of,
    train_all,
)

pytestmark = pytest.mark.distributed

Run = tuple[str, str, int, int]
"""The recipe, strategy, number of ranks and ep_size of a run."""

EP_SIZES = [(1, 1), (2, 1), (2, 2), (4, 2)]

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

STAGES = [f"deepspeed_stage_{stage}" for stage in range(3)]
RUNS: list[Run] = [("top 2", "ddp", 2, 1), ("top 2", "deepspeed_stage_2", 2, 2)]
if WHOLE:
    every = [*STAGES, "deepspeed_stage_1_offload", "deepspeed_stage_2_offload"]
    RUNS = [
        *((recipe, "baseline", 1, 1) for recipe in RECIPES),
        *((recipe, "ddp", ranks, 1) for recipe in RECIPES for ranks in (2, 4)),
        *((recipe, name, ranks, ep) for recipe in RECIPES for name in every for ranks, ep in EP_SIZES),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> dict[Run, Path]:
    """Returns the output directory of each run."""
    folder = tmp_path_factory.mktemp("runs")
    out = {run: folder / "-".join(map(str, run)) for run in RUNS}
    train_all({out[run]: [*small_data, *flags_of(run)] for run in sorted(RUNS, key=lambda run: run[2])})
    return out


def flags_of(run: Run) -> list[str]:
    recipe, strategy, ranks, ep_size = run
    return [*SAME, *RECIPES[recipe], "--strategy", strategy, "--devices", str(ranks), "--model.ep_size", str(ep_size)]


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
    found = evaluate.evaluate(run / "checkpoints" / "last.ckpt", read_arguments(["--accelerator", "cpu"]))
    assert found["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-4)
    assert metrics["parameters"] == sum(value.numel() for value in last_weights(run).values())


Shape = tuple[str, int, int]
"""The strategy, number of ranks and ep_size of a run."""

BEFORE, AFTER = 20, 45
PAIRS: list[tuple[Shape, Shape]] = [(("deepspeed_stage_0", 2, 2), ("deepspeed_stage_2", 2, 1))]
if WHOLE:
    SHAPES: list[Shape] = [("baseline", 1, 1), *((stage, *ep) for stage in STAGES for ep in ((1, 1), (2, 2), (4, 2)))]
    PAIRS = [(one, other) for one in SHAPES for other in SHAPES]

RECIPE = [
    *("--model", "net_moe", "--model.num_experts", "[2,4]", "--model.capacity_factor", "4"),
    *("--model.load_balance", "0", "--accelerator", "cpu", "--batch_size", "16", "--epochs", "2"),
    *("--data.val_fraction", "0.1", "--optimizer", "adam", "--log_interval", "1", "--gradient_clip_val", "0.5"),
    *("--optimizer.weight_decay", "0.01"),
    *("--schedule", "warmup_lr", "--schedule.warmup_num_steps", "30"),
]
"""There is no noise, drop or load-balancing loss, because they depend on the micro-batches. An epoch has 36 steps."""


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> dict[Any, Path]:
    """Returns the output directories of the runs that were resumed in another shape, by pair of shapes, and the output
    directory of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("continued")
    begun = {shape: folder / "begun-{}-{}-{}".format(*shape) for shape, _ in PAIRS}
    ended = {pair: folder / "ended-{}-{}-{}-{}-{}-{}".format(*pair[0], *pair[1]) for pair in PAIRS}

    def flags(shape: Shape, steps: int, *more: str) -> list[str]:
        where = ["--strategy", shape[0], "--devices", str(shape[1]), "--model.ep_size", str(shape[2])]
        return [*small_data, *RECIPE, *where, "--max_steps", str(steps), *more]

    train_all({out: flags(shape, BEFORE) for shape, out in begun.items()})
    train_all({folder / "whole": flags(("ddp", 2, 1), AFTER)})
    train_all({out: flags(pair[1], AFTER, "--resume", str(begun[pair[0]])) for pair, out in ended.items()})
    return {**ended, "whole": folder / "whole"}


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_resumes_in_another_shape(pair: tuple[Shape, Shape], continued: dict[Any, Path]):
    """Every expert keeps its weights, optimizer state and schedule. Adam without its state would differ at once."""
    found, whole = losses(continued[pair]), losses(continued["whole"])
    assert found == pytest.approx({step: whole[step] for step in range(BEFORE + 1, AFTER + 1)}, abs=1e-4)
