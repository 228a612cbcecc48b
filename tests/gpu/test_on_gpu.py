"""Every strategy learns the digits on one GPU, and its losses agree with the losses of the baseline."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cifar_zero.config.strategy_specs import STRATEGIES
from tests.support.helpers import assert_ok, losses, metrics_of, needs_gpu, run_folder_of, run_program

pytestmark = needs_gpu

ONE = ["--devices", "1"]
PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]
NO_FLOAT16 = ("deepspeed_stage_0", "fsdp2", "fsdp", "tensor_parallel", "pipeline")
"""Strategies that do not scale the loss."""


def _trains(strategy: str, precision: str) -> bool:
    return not (strategy in NO_FLOAT16 and precision == "16-mixed")


CASES = [
    (strategy, precision)
    for strategy in STRATEGIES
    for precision in PRECISIONS
    if not strategy.endswith(("nvme", "superoffload")) and _trains(strategy, precision)
]
MOE_STRATEGIES = ["baseline", *(f"deepspeed_stage_{stage}" for stage in range(3))]
NET = ["--model", "net", "--batch_size", "64", "--max_steps", "200"]
VIT = ["--model", "vit_tiny", "--batch_size", "64", "--max_steps", "1500"]
RECIPES = {
    "sgd": [*NET, "--optimizer", "sgd", "--optimizer.lr", "0.1", "--gradient_clip_val", "1"],
    "adam": [*NET, "--optimizer", "adam", "--optimizer.lr", "0.003"],
    # A transformer needs more steps, and learns nothing in them with SGD.
    "vit": [*VIT, "--optimizer", "adamw", "--optimizer.lr", "0.0005", "--gradient_clip_val", "1"],
}
RUNS = [
    (strategy, precision, recipe)
    for strategy, precision in CASES
    for recipe in (["vit"] if STRATEGIES[strategy].one_replica else ["sgd", "adam"])
]
COMPARED_STEPS = 20
"""Number of steps whose losses are compared. Later the losses fall and training amplifies rounding error, so that runs
differ."""
BOUNDS = {"32-true": 2e-3, "bf16-mixed": 5e-3, "16-mixed": 1e-2}
"""Largest difference of the compared losses from the baseline's losses in 32-true, for each precision. In 32-true a GPU
computes convolutions in TF32. On the CPU, bfloat16 differs by 1.7e-3, and the losses of two neighbouring batches differ
by 1e-2. In float16 the first steps may be skipped, until the scaler has found a scale."""


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns flags for the digits, which are rendered once for all tests."""
    root = tmp_path_factory.mktemp("digits")
    return ["--data.source", "digits", "--data.root", str(root), "--data.val_fraction", "0"]


@pytest.fixture(scope="session")
def baselines(tmp_path_factory: pytest.TempPathFactory, digits: list[str]) -> dict[str, dict[int, float]]:
    """Returns the baseline's losses of each recipe, by step."""
    out = tmp_path_factory.mktemp("baselines")
    return {recipe: losses(trained(out / recipe, digits, "baseline", "32-true", recipe)) for recipe in RECIPES}


def trained(out: Path, digits: list[str], strategy: str, precision: str, recipe: str) -> Path:
    """Trains and returns the run folder."""
    placement = [*ONE, "--strategy", strategy, "--precision", precision]
    assert_ok(run_program("train.py", *placement, *digits, *RECIPES[recipe], "--out", str(out)))
    return run_folder_of(out)


def assert_learned(run: Path, loss: float, accuracy: float) -> None:
    """Checks the mean loss of the last 20 steps (chance: ln 10 = 2.30) and the test accuracy (chance: 0.1)."""
    assert sum([*losses(run).values()][-20:]) / 20 < loss
    assert metrics_of(run)["test/acc"] > accuracy


@pytest.mark.parametrize(("strategy", "precision", "recipe"), RUNS)
def test_learns_and_agrees_with_the_baseline(
    strategy: str, precision: str, recipe: str, digits: list[str], baselines: dict[str, Any], tmp_path: Path
):
    run = trained(tmp_path, digits, strategy, precision, recipe)
    metrics = metrics_of(run)
    assert (metrics["accelerator"], metrics["precision"]) == ("gpu", precision)
    found = losses(run)
    for step in range(1, COMPARED_STEPS + 1):
        assert found[step] == pytest.approx(baselines[recipe][step], abs=BOUNDS[precision]), f"step {step}"
    assert_learned(run, *((2.1, 0.2) if recipe == "vit" else (1.8, 0.4)))


@pytest.mark.parametrize(
    ("strategy", "precision"), [case for case in product(MOE_STRATEGIES, PRECISIONS) if _trains(*case)]
)
@pytest.mark.parametrize(("model", "batch_size", "steps"), [("net_moe", 64, 500), ("vit_moe", 16, 12)])
def test_mixtures_of_experts(
    model: str, batch_size: int, steps: int, strategy: str, precision: str, digits: list[str], tmp_path: Path
):
    """All experts are on one GPU. In float32, cifar-zero evaluate finds about the same test loss as the run's own test.
    The small model also learns, but the transformer has too few steps."""
    flags = ["--strategy", strategy, "--precision", precision, "--model", model, "--model.num_experts", "[4]"]
    flags += ["--optimizer", "adam", "--batch_size", str(batch_size), "--max_steps", str(steps)]
    flags += ["--gradient_clip_val", "1", "--out", str(tmp_path)]
    assert_ok(run_program("train.py", *ONE, *digits, *flags))
    run = run_folder_of(tmp_path)
    if model == "net_moe":
        assert_learned(run, 1.8, 0.4)
    done = run_program("evaluate", str(run))
    assert_ok(done)
    assert float(done.stdout.split("test loss")[1]) == pytest.approx(metrics_of(run)["test/loss"], rel=0.02)


@pytest.mark.parametrize("switch", ["--compile", "--cuda_graphs"])
@pytest.mark.parametrize("strategy", ["baseline", "ddp", "deepspeed_stage_0", "deepspeed_stage_2"])
def test_compiled_and_as_graphs(switch: str, strategy: str, small_data: list[str], tmp_path: Path):
    flags = ["--strategy", strategy, "--optimizer", "adam", "--batch_size", "16", "--max_steps", "40"]
    losses = []
    for extra in ([], [switch]):
        out = tmp_path / "-".join(["out", *extra])
        assert_ok(run_program("train.py", *ONE, *small_data, *flags, *extra, "--out", str(out)))
        losses.append(metrics_of(out)["test/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
