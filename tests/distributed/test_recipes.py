"""Every recipe of configs/ trains through train.py, under the baseline and under a ZeRO stage on two ranks.

`make recipes` runs this; `make test` builds each recipe (tests/test_tree.py), which costs seconds where this costs
minutes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.helpers import ROOT, on_a_small_cpu, run_folder_of, train_all

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif("RECIPES" not in os.environ, reason="some minutes, of make recipes"),
]

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
SHORT = ["--accelerator", "cpu", "--precision", "32-true", "--batch_size", "16", "--accumulate", "1"]
SHORT += ["--max_steps", "6", "--epochs", "1", "--log_interval", "2", "--name", "run"]
SHAPES = {"baseline": 1, "deepspeed_stage_2": 2}
"""Strategy and ranks."""


@pytest.fixture(scope="module", params=SHAPES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small_data: list[str]):
    """The strategy, and the run folder of every recipe, all in the same processes."""
    strategy: str = request.param
    folder = tmp_path_factory.mktemp(strategy)
    where = ["--strategy", strategy, "--devices", str(SHAPES[strategy])]
    flags = {
        folder / recipe.stem: [*flags_of(recipe, strategy), *on_a_small_cpu(recipe), *small_data, *where, *SHORT]
        for recipe in RECIPES
    }
    train_all(flags, timeout=1800)
    return strategy, {out.name: run_folder_of(out) for out in flags}


def flags_of(recipe: Path, strategy: str) -> list[str]:
    """The recipe, and what its network needs where it was written for other ranks."""
    on_one_rank = strategy == "baseline" and "ep_size" in recipe.read_text()
    return ["--config", str(recipe), *(["--model.ep_size", "1"] if on_one_rank else [])]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", [recipe.stem for recipe in RECIPES])
def test_trains(recipe: str, runs: tuple[str, dict[str, Path]]):
    strategy, folders = runs
    metrics = json.loads((folders[recipe] / "metrics.json").read_text())
    assert (metrics["strategy"], metrics["world_size"]) == (strategy, SHAPES[strategy])
    assert 0 < metrics["steps"] <= 6
    assert 0 < metrics["train/loss"] < 20  # random images: 2.3 and what a fresh network adds
    assert 0 <= metrics["test/acc"] <= 1
