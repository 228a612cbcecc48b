"""Every recipe of configs/ trains through train.py, under the baseline and under ZeRO on two ranks.

`make recipes` runs this; `make test` builds each recipe (tests/test_tree.py), which costs seconds where this costs
minutes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import cli
from optimizers import OFFLOADED_BY
from tests.helpers import ROOT, on_a_small_cpu, run_folder_of, train_all

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif("RECIPES" not in os.environ, reason="some minutes, of make recipes"),
]

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
SHORT = ["--accelerator", "cpu", "--precision", "32-true", "--batch_size", "16", "--accumulate", "1"]
SHORT += ["--max_steps", "6", "--epochs", "1", "--log_interval", "2", "--name", "run"]


@pytest.fixture(scope="module", params=[1, 2])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small_data: list[str]):
    """The number of ranks, and the run folder of every recipe, all in the same processes."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp(f"ranks_{ranks}")
    flags = {}
    for recipe in RECIPES:
        where = ["--strategy", strategy_of(recipe, ranks), "--devices", str(ranks)]
        own = [*flags_of(recipe, ranks), *on_a_small_cpu(recipe)]
        flags[folder / recipe.stem] = [*own, *small_data, *where, *SHORT]
    train_all(flags, timeout=1800)
    return ranks, {out.name: run_folder_of(out) for out in flags}


def strategy_of(recipe: Path, ranks: int) -> str:
    """On two ranks ZeRO 2, or 0 where the recipe's optimizer needs whole tensors."""
    cuts = cli.parse(["--config", str(recipe)]).optimizer.name in OFFLOADED_BY
    return "baseline" if ranks == 1 else "deepspeed_stage_2" if cuts else "deepspeed_stage_0"


def flags_of(recipe: Path, ranks: int) -> list[str]:
    """The recipe, and what its network needs where it was written for other ranks."""
    on_one_rank = ranks == 1 and "ep_size" in recipe.read_text()
    return ["--config", str(recipe), *(["--model.ep_size", "1"] if on_one_rank else [])]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_trains(recipe: Path, runs: tuple[int, dict[str, Path]]):
    ranks, folders = runs
    metrics = json.loads((folders[recipe.stem] / "metrics.json").read_text())
    assert (metrics["strategy"], metrics["world_size"]) == (strategy_of(recipe, ranks), ranks)
    assert 0 < metrics["steps"] <= 6
    assert 0 < metrics["train/loss"] < 20  # random images: 2.3 and what a fresh network adds
    assert 0 <= metrics["test/acc"] <= 1
