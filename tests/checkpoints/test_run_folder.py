"""Run folders: each is claimed once, and any path to it finds its checkpoint."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cifar_zero.checkpoints import run_folder
from cifar_zero.core.errors import UsageError


def test_runs_that_start_together_get_separate_folders(tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: run_folder.claim(str(tmp_path), "net-baseline"), range(32)))
    assert sorted(path.name for path in claimed) == sorted(f"version_{n}" for n in range(32))


def test_a_directory_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        run_folder.claim(str(tmp_path / "file"), "net-baseline")


def test_a_directory_is_tried_out_and_left_as_it_was(tmp_path: Path):
    """Root may write anywhere as far as permissions show, but no folder can be made in /proc."""
    (tmp_path / "net").mkdir()
    os.utime(tmp_path / "net", (100, 100))
    run_folder.check_writable(str(tmp_path), "net")
    run_folder.check_writable(str(tmp_path / "new" / "runs"), "net")
    assert [path.name for path in tmp_path.iterdir()] == ["net"]
    assert (tmp_path / "net").stat().st_mtime == 100
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", *([Path("/proc/x")] if Path("/proc").is_dir() else [])):
        with pytest.raises(UsageError, match=f"--out {out}: .* cannot be written"):
            run_folder.check_writable(str(out), "net")


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
    out = str(tmp_path)
    assert run_folder.last_checkpoint(out, "net") == second
    assert run_folder.find_checkpoint(str(tmp_path / "net" / "version_0")) == first
    assert run_folder.find_checkpoint(str(second)) == second
    for missing in (str(tmp_path / "nowhere"), str(tmp_path / "net" / "version_2")):
        with pytest.raises(UsageError):
            run_folder.find_checkpoint(missing)
    with pytest.raises(UsageError, match="no run of the name other"):
        run_folder.last_checkpoint(out, "other")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("net-ddp/version_0", "did you mean {}/net-ddp-digits-fallback/version_0?"),
        ("net-dpp-digits-fallback", "did you mean {}/net-ddp-digits-fallback?"),
        ("net-ddp/version_1", "give a run folder"),
        ("net-ddp-digits-fallback/version_0/checkpoints/last.ckpt/x/y", "give a run folder"),
    ],
)
def test_a_path_that_does_not_exist(tmp_path: Path, given: str, meant: str):
    """The error names a similar path, such as the folder of a run that fell back to the digits."""
    make(tmp_path / "net-ddp-digits-fallback" / "version_0" / "checkpoints" / "last.ckpt", 100)
    (tmp_path / "net-ddp_offload").mkdir()
    with pytest.raises(UsageError) as error:
        run_folder.find_checkpoint(str(tmp_path / given))
    assert str(error.value).startswith(f"{tmp_path / given} does not exist: {meant.format(tmp_path)}")


def test_a_recipe_is_found_only_in_the_run_folder(tmp_path: Path):
    """A config.yaml further up, or next to a copy of a checkpoint, is another program's."""
    (tmp_path / "config.yaml").write_text("of another program")
    run = tmp_path / "net" / "version_0"
    inside = [make(run / "checkpoints" / name, 100) for name in ("last.ckpt", "sharded.ckpt")]
    elsewhere = [make(tmp_path / "net.ckpt", 100), make(run / "net.ckpt", 100)]
    assert [run_folder.recipe_of(checkpoint) for checkpoint in (*inside, *elsewhere)] == [None] * 4
    (run / "config.yaml").write_text("epochs: 2")
    assert [run_folder.recipe_of(checkpoint) for checkpoint in inside] == [run / "config.yaml"] * 2


def test_a_path_inside_a_checkpoint_folder_finds_the_checkpoint(tmp_path: Path):
    """Users do not know which path is the checkpoint: Lightning issues 20453 and 17763."""
    checkpoint = make(tmp_path / "net" / "version_0" / "checkpoints" / "sharded.ckpt", 100)
    file = checkpoint / "checkpoint" / "mp_rank_00_model_states.pt"
    file.write_text("")
    for given in (checkpoint.parent, checkpoint, checkpoint / "latest", checkpoint / "checkpoint", file):
        assert run_folder.find_checkpoint(str(given)) == checkpoint


def test_a_file_named_latest_above_a_checkpoint_is_no_checkpoint(tmp_path: Path):
    (tmp_path / "latest").write_text("of another program")
    checkpoint = make(tmp_path / "models" / "net.ckpt", 100)
    assert run_folder.find_checkpoint(str(checkpoint)) == checkpoint


def test_the_newest_checkpoint_has_the_most_steps_whatever_a_copy_did_to_the_times(tmp_path: Path):
    """In the last run of a name, which may have begun at an earlier checkpoint than the end of the one before."""
    for run, name, step, when in (
        ("version_0", "last.ckpt", 90, 400),
        ("version_1", "best-epoch01-step000030.ckpt", 30, 300),
        ("version_1", "last.ckpt", 40, 200),
        ("version_1", "best-epoch00-step000020.ckpt", 20, 100),
    ):
        file = make(tmp_path / "net" / run / "checkpoints" / name, when)
        torch.save({"state_dict": {"w": torch.zeros(300)}, "global_step": step, "epoch": 1}, file)
        os.utime(file, (when, when))
    newest = tmp_path / "net" / "version_1" / "checkpoints" / "last.ckpt"
    assert run_folder.newest_checkpoint(tmp_path / "net" / "version_1") == newest
    assert run_folder.newest_checkpoint(tmp_path / "net") == newest
