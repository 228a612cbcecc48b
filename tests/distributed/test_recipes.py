"""Trains every recipe of configs/ with train.py as written, under the baseline and under ZeRO on two ranks.

Each run takes its first steps on the digits, with the recipe's own settings. A model made for a GPU has the size that
the recipe names for a CPU, and a transformer has three blocks. `make test` only builds each recipe
(tests/test_tree.py), which takes seconds.
"""

import math
import re
from pathlib import Path
from statistics import mean

import pytest

from cifar_zero.config import command_line
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.schedules import SCHEDULES
from datamodule import CIFARDataModule
from tests.support.helpers import ROOT, losses, metrics_of, of_test_all, on_a_small_cpu, train_all

pytestmark = [pytest.mark.distributed, of_test_all]

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
STEPS = 8
GUESS = math.log(10)
SHORT = ["--accelerator", "cpu", "--log_interval", "1", "--name", "run", "--logger", "none"]
SHORT += ["--data.source", "digits", "--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"]


@pytest.fixture(scope="module", params=[1, 2])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Returns the number of ranks, and the output directory of every recipe. The digits are rendered once."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp(f"ranks_{ranks}")
    data = [*SHORT, "--data.root", str(tmp_path_factory.getbasetemp() / "digits")]
    flags = {folder / recipe.stem: flags_of(recipe, ranks, data) for recipe in RECIPES}
    train_all(flags)
    return ranks, folder


def flags_of(recipe: Path, ranks: int, data: list[str]) -> list[str]:
    """Returns the recipe's flags, with the number of ranks, a model size for a CPU, and the number of steps."""
    where = ["--strategy", strategy_of(recipe, ranks), "--devices", str(ranks)]
    where += ["--model.ep_size", "1"] if ranks == 1 and "ep_size" in recipe.read_text() else []
    on_a_cpu = re.search(r"On a CPU: (--.*?)(?:\. |$)", recipe.read_text(), re.MULTILINE)
    size = [*on_a_small_cpu(recipe), *(on_a_cpu[1].split() if on_a_cpu else [])]
    size += ["--model.depth", "3"] if "vit_" in recipe.read_text() else []
    size += ["--model.weights", ""] if "weights: DEFAULT" in recipe.read_text() else []  # nothing is downloaded
    flags = ["--config", str(recipe), *size, *data, *where]
    config = command_line.parse(flags)
    if hasattr(SCHEDULES[config.recipe.schedule.name](), "total_steps"):  # of the whole recipe, not of its first steps
        images = CIFARDataModule(config)
        images.setup()
        steps = config.recipe.epochs * len(images.train_dataloader()) // config.placement.accumulate
        flags += ["--schedule.total_steps", str(steps)]
    return flags if recipe.stem == "debug_overfit" else [*flags, "--max_steps", str(STEPS)]


def strategy_of(recipe: Path, ranks: int) -> str:
    """Returns the baseline on one rank. On two ranks, returns ZeRO 2, or ZeRO 0 if the recipe's optimizer needs whole
    tensors."""
    cuts = OPTIMIZERS[command_line.parse(["--config", str(recipe)]).recipe.optimizer.name].shardable
    return "baseline" if ranks == 1 else "deepspeed_stage_2" if cuts else "deepspeed_stage_0"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_trains(recipe: Path, runs: tuple[int, Path]):
    """The loss starts near the loss of a guess among ten classes, and does not rise. debug_overfit overfits its
    batch."""
    ranks, folder = runs
    metrics, actual = metrics_of(folder / recipe.stem), [*losses(folder / recipe.stem).values()]
    assert (metrics["strategy"], metrics["world_size"]) == (strategy_of(recipe, ranks), ranks)
    assert len(actual) == metrics["steps"] >= STEPS
    assert 0.8 * GUESS < actual[0] < 3 * GUESS  # a deep model's scores are large at first under --init he
    assert all(map(math.isfinite, actual))
    assert mean(actual[-4:]) < (0.01 if recipe.stem == "debug_overfit" else 1.1 * mean(actual[:4]))
    assert math.isfinite(metrics["test/loss"])
