"""Which checkpoint a run resumes, and on which images."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from cifar_zero import data
from cifar_zero.checkpoints.resume import check_same_run, checkpoint_to_resume, newest_of, source_of
from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from cifar_zero.training.resolve import of_machine, with_checkpoint


def resumed(out: Path, *flags: str) -> str:
    return checkpoint_to_resume(command_line.parse(["--out", str(out), "--name", "mine", *flags]))


def checkpoint_of(out: Path, name: str) -> Path:
    """Writes an empty checkpoint for a run's name, for code that only looks for the file."""
    file = out / name / "version_0" / "checkpoints" / "last.ckpt"
    file.parent.mkdir(parents=True)
    torch.save({}, file)
    return file


@pytest.mark.parametrize("more", [(), ("--resume", "auto"), ("--resume", "another")])
def test_a_requeued_slurm_job_resumes_its_own_run(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Requeued before its first checkpoint, it starts as it did the first time."""
    another = checkpoint_of(tmp_path, "another")
    flags = [str(another) if flag == "another" else flag for flag in more]
    as_submitted = str(another) if "another" in more else ""
    assert resumed(tmp_path, *flags) == as_submitted
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert resumed(tmp_path, *flags) == as_submitted
    (tmp_path / "mine" / "version_0").mkdir(parents=True)
    assert resumed(tmp_path, *flags) == as_submitted
    (tmp_path / "mine" / "version_0").rmdir()
    own = checkpoint_of(tmp_path, "mine")
    os.utime(own, (0, 0))
    assert resumed(tmp_path, *flags) == str(own)
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    assert resumed(tmp_path, *flags) == (str(own) if "auto" in more else as_submitted)


def test_a_benchmark_always_starts_from_step_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint_of(tmp_path, "mine")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert resumed(tmp_path, "--bench_steps", "1") == ""


def test_resume_last_takes_a_run_on_the_digits_only_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run fell back from CIFAR-10 to the digits; a requeued SLURM job resumes its own run in any case."""
    digits = checkpoint_of(tmp_path, "mine-digits-fallback")
    for source in ("auto", "cifar10"):
        with pytest.raises(UsageError, match=r"digits, not CIFAR-10: --resume .*-digits-fallback continues"):
            resumed(tmp_path, "--resume", "last", "--data.source", source)
        assert resumed(tmp_path, "--resume", "auto", "--data.source", source) == ""
    assert resumed(tmp_path, "--resume", "last", "--data.source", "digits") == str(digits)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert resumed(tmp_path) == str(digits)
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    own = checkpoint_of(tmp_path, "mine")
    os.utime(own.parent.parent.parent, (0, 0))
    assert resumed(tmp_path, "--resume", "last") == str(own)


@pytest.mark.parametrize(
    ("before", "now", "continued"),
    [
        ("digits", "auto", "digits"),  # whether or not CIFAR-10 is available by now
        ("cifar10", "auto", "cifar10"),
        ("digits", "digits", "digits"),
        ("digits", "synthetic", "--data.source digits, this one has synthetic"),
        ("digits", "cifar10", "--data.source digits, this one has cifar10"),
        ("folder", "auto", "--data.source folder, this one has auto"),
    ],
)
def test_a_run_continues_on_the_images_that_it_had(before: str, now: str, continued: str):
    resume = ["--resume", "last.ckpt", "--data.source"]
    config, classes = command_line.parse([*resume, now]), [*data.class_names(command_line.parse([]).data)]
    if "this one" in continued:
        with pytest.raises(UsageError, match=f"{continued}: .*, --weights last.ckpt without --resume fine-tunes"):
            check_same_run(config, asdict(command_line.parse([*resume, before])))
        return
    record = {"config": asdict(command_line.parse([*resume, before])), "classes": classes}
    check_same_run(config, record["config"])
    if before == "digits":
        with pytest.raises(UsageError, match=r"had other classes than --data.source digits now has \("):
            source_of(config, record)
        record["classes"] = [*data.class_names(command_line.parse(["--data.source", "digits"]).data)]
    assert source_of(config, record) == continued


def test_a_folder_must_have_the_classes_that_it_had(tmp_path: Path):
    for name in ("cat", "dog"):
        for split in ("train", "test"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "0.png").touch()
    config = command_line.parse(["--resume", "last.ckpt", "--data.source", "folder", "--data.root", str(tmp_path)])
    record = {"config": asdict(config), "classes": ["cat", "dog"]}
    assert source_of(config, record) == "folder"
    record["classes"] = ["bird", "dog"]
    with pytest.raises(UsageError, match=r"now has \(bird, cat\): .* --weights last.ckpt without --resume"):
        source_of(config, record)


@pytest.mark.parametrize("damaged", ["", "[1]", "{", '[{"rank": 0}]', "\udcff"])
def test_a_damaged_ranks_json_is_ignored(damaged: str, tmp_path: Path):
    own = checkpoint_of(tmp_path, "mine")
    note = own.parent.parent / "ranks.json"
    note.write_bytes(damaged.encode(errors="surrogateescape"))
    assert newest_of({"ours"}, str(tmp_path), "mine") is None
    note.write_text('[{"agent": "theirs"}, {"agent": "ours"}]')
    assert newest_of({"ours"}, str(tmp_path), "mine") == own
    note.write_text('[{"agent": ""}]')
    assert newest_of({""}, str(tmp_path), "mine") is None


def test_a_strategy_that_cannot_resume_is_refused_once_a_checkpoint_is_found():
    """On several nodes rank 0 looks for the checkpoint after the other checks."""
    flags = ["--strategy", "deepspeed_stage_3_offload_nvme", "--nvme_path", "/", "--resume", "auto", "--devices", "1"]
    run = of_machine(command_line.parse(flags))
    assert with_checkpoint(run, "").config.resume == ""
    with pytest.raises(UsageError, match="--resume: deepspeed_stage_3_offload_nvme cannot be resumed"):
        with_checkpoint(run, "runs/mine/version_0/checkpoints/last.ckpt")
