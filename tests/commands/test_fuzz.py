"""Tests that each damaged or hostile file causes one clear error or does no harm. `make test-all` makes 1000 such
files."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_zero import data, models
from cifar_zero.config import command_line
from cifar_zero.config.settings import DataConfig
from cifar_zero.core.errors import RunError, UsageError
from tests.support.helpers import ROOT, WHOLE, read_weights, run_folder_of, train_all
from tests.users_code.evil import Evil

MUTATIONS = 200 if WHOLE else 15
"""Number of damaged copies of each kind of file."""


def truncate(file: Path, rng: random.Random, proof: Path) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def flip(file: Path, rng: random.Random, proof: Path) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 10, 100))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def remove(file: Path, rng: random.Random, proof: Path) -> None:
    file.unlink()


def fill_with_noise(file: Path, rng: random.Random, proof: Path) -> None:
    file.write_bytes(rng.randbytes(rng.choice((0, 1, 100, 10_000))))


def run_code(file: Path, rng: random.Random, proof: Path) -> None:
    if rng.random() < 0.5:
        torch.save({"state_dict": {}, "module": {}, "optimizer_state_dict": {}, "evil": Evil(proof)}, file)
    else:
        file.write_bytes(pickle.dumps(Evil(proof)))


def take_anothers_place(file: Path, rng: random.Random, proof: Path) -> None:
    torch.save({"state_dict": {"net.weight": torch.ones(3)}, "global_step": 1}, file)


DAMAGES = [truncate, flip, flip, remove, fill_with_noise, run_code, take_anothers_place]


def fuzz(original: Path, tmp_path: Path, read: Callable[[Path], Any], same: Callable[[Any], bool]) -> int:
    """Damages copies of a file or folder. `same` checks what was read from a copy that was not refused.

    Returns how many copies were refused.
    """
    rng = random.Random(0)
    refused = 0
    proof = tmp_path / "proof"
    for number in range(MUTATIONS):
        copy = tmp_path / f"{number}" / original.name
        if original.is_dir():
            shutil.copytree(original, copy)
        else:
            copy.parent.mkdir()
            shutil.copyfile(original, copy)
        target = rng.choice([*(path for path in sorted(copy.rglob("*")) if path.is_file())] or [copy])
        damage = rng.choice(DAMAGES)
        damage(target, rng, proof)
        case = f"{number}: {damage.__name__} {target.name}"
        try:
            found = read(copy)
        except Exception as error:
            if not isinstance(error, (UsageError, RunError)) or "\n" in str(error):
                raise AssertionError(case) from error
            refused += 1
        else:
            assert same(found), case
        assert not proof.exists(), case
        shutil.rmtree(copy.parent)
    return refused


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("deepspeed_stage_3", 2), *([("baseline", 1), ("deepspeed_stage_2", 1)] if WHOLE else [])],
)
def test_checkpoints(strategy: str, devices: int, small_data: list[str], tmp_path: Path):
    flags = ["--strategy", strategy, "--devices", str(devices), "--accelerator", "cpu", "--batch_size", "16"]
    train_all({tmp_path / "out": [*small_data, *flags, "--max_steps", "4", "--trainer.limit_test_batches", "1"]})
    checkpoint = run_folder_of(tmp_path / "out") / "checkpoints" / "last.ckpt"
    net = models.build("net", 10)
    whole = read_weights(net, checkpoint)

    def same(found: Any) -> bool:
        return all(torch.equal(found[key], whole[key]) for key in whole)

    assert fuzz(checkpoint, tmp_path, lambda path: read_weights(net, path), same) > MUTATIONS / 3


def test_caches(tmp_path: Path):
    """Damaged caches are made again. One wrong bit of an image may be overlooked, because the result is still an
    image."""
    cache = tmp_path / "cache" / "synthetic-640"

    def read(path: Path) -> Any:
        config = DataConfig(source="synthetic", synthetic_size=640, root=str(tmp_path), cache=str(path.parent))
        return data.load(config, data.prepare(config))

    whole = read(cache)
    assert (cache / "meta.json").exists()
    assert fuzz(cache, tmp_path, read, lambda found: (found.train_labels == whole.train_labels).all()) == 0


def test_recipes(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(command_line.dump(command_line.parse(["--config", str(ROOT / "configs" / "deepspeed.yaml")])))
    fuzz(recipe, tmp_path, lambda path: command_line.parse(["--config", str(path)]), lambda found: True)
