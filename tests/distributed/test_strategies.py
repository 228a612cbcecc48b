"""Tests that strategies train and test the same model with each optimizer, on one and two real ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_zero import models
from cifar_zero.checkpoints.weights import net_weights
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.optimizers import OPTIMIZERS
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

NOT_HERE = ("deepspeed_stage_3_offload_nvme", "deepspeed_stage_3_superoffload")
ON_CPU = [name for name, spec in STRATEGIES.items() if name not in NOT_HERE and not spec.one_replica]
PLAIN = {("baseline", 1), ("ddp", 1), ("ddp", 2), ("fsdp2", 2), ("deepspeed_stage_2", 2)}
PLAIN |= {("deepspeed_stage_3_offload", 2)}
ACCUMULATED = ["deepspeed_stage_2"]
ADAM = ["deepspeed_stage_3_offload"]
BFLOAT16 = [0, 3]
OTHERS = {("muon", "deepspeed_stage_0"), ("adagrad", "deepspeed_stage_3")}
"""Other optimizers, each with a strategy."""
if WHOLE:
    PLAIN = {(name, ranks) for name in ON_CPU for ranks in (1, 2)}
    ACCUMULATED += [f"deepspeed_stage_{stage}" for stage in ("0", "1", "3", "3_offload")]
    ADAM += ["deepspeed_stage_3", "deepspeed_stage_1_offload"]
    BFLOAT16 += [2]
    stages = [f"deepspeed_stage_{stage}" for stage in ("0", "1", "2", "3", "2_offload", "3_offload")]
    OTHERS |= {(name, stage) for name in OPTIMIZERS if OPTIMIZERS[name].shardable for stage in stages}
STEPS, IMAGES = 12, 320
RECIPES = {
    "plain": ["--optimizer", "sgd", "--optimizer.lr", "0.05"],
    # Not seed 0, whose random images have two pixels under a max-pool that nearly tie, so that rounding decides which
    # of them gets the gradient.
    "accumulated": ["--accumulate", "2", "--gradient_clip_val", "1.0", "--optimizer.lr", "0.05", "--seed", "1"],
    "accumulated adam": ["--accumulate", "2", "--gradient_clip_val", "1.0", "--optimizer", "adam"],
    "bfloat16": ["--precision", "bf16-mixed", "--optimizer", "adamw"],
    "clipped adam": ["--gradient_clip_val", "1.0", "--optimizer", "adam"],
}
RATES = {"sgd": "0.05", "adadelta": "1", "adagrad": "0.01"}
for name in OPTIMIZERS:
    RECIPES[f"decaying {name}"] = ["--optimizer", name, "--optimizer.lr", RATES.get(name, "0.001")]
    RECIPES[f"decaying {name}"] += ["--optimizer.weight_decay", "0.1", "--schedule", "cosine"]
Run = tuple[str, int, str]

RUNS: set[Run] = {
    *((name, ranks, "plain") for name, ranks in PLAIN),
    *((name, 2, "accumulated") for name in ["ddp", *ACCUMULATED]),
    *((name, 2, "accumulated adam") for name in ADAM),
    *((f"deepspeed_stage_{stage}", 2, "bfloat16") for stage in BFLOAT16),
    ("baseline", 1, "clipped adam"),
    *((used, 2, f"decaying {name}") for name, strategy in OTHERS for used in ("ddp", strategy)),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Run, Path]:
    """Returns the output directory of each run, by strategy, ranks and recipe."""
    folder = tmp_path_factory.mktemp("runs")
    out = {run: folder / "-".join(map(str, run)) for run in sorted(RUNS)}
    same = ["--data.source", "synthetic", "--data.synthetic_size", str(IMAGES), "--data.root", str(folder)]
    same += ["--accelerator", "cpu", "--batch_size", "16", "--data.val_fraction", "0"]
    same += ["--max_steps", str(STEPS), "--log_interval", "8"]
    where = {run: ["--strategy", run[0], "--devices", str(run[1])] for run in RUNS}
    train_all({out[run]: [*same, *RECIPES[run[2]], *where[run]] for run in out})
    return out


def weights(runs: dict[Run, Path], *run: Any) -> dict[str, torch.Tensor]:
    """Returns a run's final weights from its checkpoint."""
    metrics = metrics_of(runs[run])
    assert (metrics["strategy"], metrics["world_size"], metrics["steps"]) == (*run[:2], STEPS)
    assert (run_folder_of(runs[run]) / "deepspeed.json").exists() == run[0].startswith("deepspeed")
    assert metrics["num_test"] == IMAGES
    return last_weights(runs[run])


@pytest.mark.parametrize(("strategy", "devices"), sorted(PLAIN))
def test_ends_with_the_weights_of_ddp(strategy: str, devices: int, runs: dict[Run, Path]):
    """Without accumulation and clipping, weights trained with SGD agree bit for bit, offloaded or not."""
    expected = weights(runs, "ddp", devices, "plain")
    assert largest_difference(weights(runs, strategy, devices, "plain"), expected) == 0
    start = models.build("net", 10).state_dict()
    assert largest_difference(expected, start) > 0.01  # it did train


@pytest.mark.parametrize("strategy", ACCUMULATED)
def test_agrees_under_accumulation_and_clipping(strategy: str, runs: dict[Run, Path]):
    """Rounding differs, because stages 2 and 3 sum gradients over ranks before they sum over micro-batches, and the
    other strategies sum over ranks last."""
    expected = weights(runs, "ddp", 2, "accumulated")
    assert largest_difference(weights(runs, strategy, 2, "accumulated"), expected) < 1e-5


@pytest.mark.parametrize("strategy", ADAM)
def test_agrees_with_adam(strategy: str, runs: dict[Run, Path]):
    """Adam divides each gradient by its size, which amplifies the rounding errors of small gradients.

    The reference has one rank and no accumulation, because these do not change the maths.
    """
    expected = weights(runs, "baseline", 1, "clipped adam")
    assert largest_difference(weights(runs, strategy, 2, "accumulated adam"), expected) < 1e-4


def test_stages_agree_in_bfloat16(runs: dict[Run, Path]):
    """The float32 weights that the optimizer updates agree bit for bit. Stage 3 too starts from weights drawn in
    float32; zero.Init alone would not do that. At stage 0, DeepSpeed alone would count a step of AdamW at its start."""
    first, *others = (weights(runs, f"deepspeed_stage_{stage}", 2, "bfloat16") for stage in BFLOAT16)
    assert [largest_difference(first, other) for other in others] == [0] * len(others)


def test_ranks_do_not_change_the_maths(runs: dict[Run, Path]):
    one, two = (weights(runs, "ddp", devices, "plain") for devices in (1, 2))
    assert largest_difference(one, two) < 1e-5


@pytest.mark.parametrize(("name", "strategy"), sorted(OTHERS))
def test_each_optimizer_agrees(name: str, strategy: str, runs: dict[Run, Path]):
    """Weights and optimizer state agree bit for bit, because each element has its own update, however parameters are
    sharded. Muon updates whole matrices, which no strategy here shards. DeepSpeed's C++ optimizers round differently
    from torch's."""
    actual, expected = (last_checkpoint(runs[used, 2, f"decaying {name}"]) for used in (strategy, "ddp"))
    one, other = (checkpoint["optimizer_states"][0]["state"] for checkpoint in (actual, expected))
    tolerance = 1e-4 if strategy.endswith("offload") and OPTIMIZERS[name].compiled else 0
    assert one.keys() == other.keys()
    assert max(largest_difference(one[number], other[number]) for number in one) <= tolerance
    assert largest_difference(net_weights(actual), net_weights(expected)) <= tolerance
