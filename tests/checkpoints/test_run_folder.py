"""Each run folder is claimed once, and any path to a run folder finds its checkpoint."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cifar_zero.checkpoints import run_folder
from cifar_zero.core.errors import UsageError


def test_runs_that_start_together_get_separate_folders(tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: run_folder.claim(str(tmp_path), "net-baseline"), range(32)))
    assert sorted(path.name for path in claimed) == sorted(f"version_{n}" for n in range(32))


def make(path: Path, when: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.startswith("sharded"):
        (path / "checkpoint").mkdir(parents=True)
        (path / "latest").write_text("checkpoint")
    else:
        path.write_text("")
    os.utime(path, (when, when))
    return path


def test_checkpoints_are_found_by_run_by_name_and_by_path(tmp_path: Path):
    first = make(tmp_path / "net" / "version_0" / "checkpoints" / "last.ckpt", 100)
    second = make(tmp_path / "net" / "version_1" / "checkpoints" / "sharded.ckpt", 200)
    (tmp_path / "net" / "version_2").mkdir()
    assert run_folder.last_checkpoint(str(tmp_path), "net") == second
    assert run_folder.find_checkpoint(str(tmp_path / "net" / "version_0")) == first
    assert run_folder.find_checkpoint(str(second)) == second
    for missing in (str(tmp_path / "nowhere"), str(tmp_path / "net" / "version_2")):
        with pytest.raises(UsageError):
            run_folder.find_checkpoint(missing)


def test_a_recipe_is_found_only_in_the_run_folder(tmp_path: Path):
    """A config.yaml in a parent folder, or next to a copy of a checkpoint, may belong to another program."""
    (tmp_path / "config.yaml").write_text("of another program")
    run = tmp_path / "net" / "version_0"
    inside = [make(run / "checkpoints" / name, 100) for name in ("last.ckpt", "sharded.ckpt")]
    elsewhere = [make(tmp_path / "net.ckpt", 100), make(run / "net.ckpt", 100)]
    assert [run_folder.recipe_of(checkpoint) for checkpoint in (*inside, *elsewhere)] == [None] * 4
    (run / "config.yaml").write_text("epochs: 2")
    assert [run_folder.recipe_of(checkpoint) for checkpoint in inside] == [run / "config.yaml"] * 2


def test_the_newest_checkpoint_is_the_last_of_the_last_run_whatever_a_copy_did_to_the_times(tmp_path: Path):
    """The last run of a name may have begun at an earlier checkpoint than the last one of the run before."""
    for run, name, when in (
        ("version_9", "last.ckpt", 400),
        ("version_10", "best-epoch01-step000030.ckpt", 300),
        ("version_10", "last.ckpt", 200),
        ("version_10", "best-epoch00-step000020.ckpt", 100),
    ):
        make(tmp_path / "net" / run / "checkpoints" / name, when)
    newest = tmp_path / "net" / "version_10" / "checkpoints" / "last.ckpt"
    assert run_folder.find_checkpoint(str(tmp_path / "net" / "version_10")) == newest
    assert run_folder.find_checkpoint(str(tmp_path / "net")) == newest
    newest.unlink()
    assert run_folder.find_checkpoint(str(tmp_path / "net")).name == "best-epoch01-step000030.ckpt"
