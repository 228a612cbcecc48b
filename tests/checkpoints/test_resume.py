"""Checks which checkpoint a run resumes, and on which images."""

import json
import os
from pathlib import Path

import pytest
import torch

from cifar_zero.checkpoints.resume import check_same_run, checkpoint_to_resume, saved_config
from cifar_zero.config import command_line
from cifar_zero.config.placement import ZeROConfig
from cifar_zero.config.recipe import SourceName
from cifar_zero.config.settings import Settings, tree_of
from cifar_zero.core.errors import UsageError
from cifar_zero.launch import rank_environment


def resumed(out: Path, *flags: str) -> str:
    return checkpoint_to_resume(command_line.parse(["--out", str(out), "--name", "mine", *flags]))


def checkpoint_of(out: Path, name: str, version: int = 0, job: str = "") -> Path:
    """Writes an empty checkpoint for a run's name, for code that only looks for the file. `job` is the name of the
    SLURM job and command that wrote it."""
    run = out / name / f"version_{version}"
    file = run / "checkpoints" / "last.ckpt"
    file.parent.mkdir(parents=True)
    torch.save({}, file)
    (run / "ranks.json").write_text(json.dumps([{"agent": "", "job": job}]))
    return file


def run_of(out: Path, *flags: str, name: str = "mine") -> Path:
    """Makes the folder of a run with these flags, with a checkpoint."""
    run = checkpoint_of(out, name).parent.parent
    (run / "config.yaml").write_text(command_line.dump(command_line.parse(["--out", str(out), "--name", name, *flags])))
    return run


def continued(*flags: str) -> Settings:
    return command_line.parse(flags, saved_config)


def test_a_checkpoint_is_found_by_its_path_after_a_crash_between_two_renames(tmp_path: Path):
    checkpoint = checkpoint_of(tmp_path, "theirs")
    checkpoint.rename(f"{checkpoint}.old")
    assert resumed(tmp_path, "--resume", str(checkpoint)) == str(checkpoint)


def test_a_resumed_run_needs_no_repeated_flags(tmp_path: Path):
    """A resumed run has the configuration of the earlier run, which recipes and flags override."""
    flags = ["--optimizer", "adam", "--optimizer.betas", "[0.8, 0.9]", "--schedule", "cosine", "--epochs", "9"]
    run, recipe = run_of(tmp_path, *flags), tmp_path / "recipe.yaml"
    recipe.write_text("log_interval: 7\nseed: 3\n")
    config = continued("--resume", str(run), "--config", str(recipe), "--seed", "4", "--schedule.total_steps", "5")
    assert (config.output.name, config.output.out, config.recipe.epochs) == ("mine", str(tmp_path), 9)
    assert (config.recipe.optimizer.name, config.recipe.optimizer.options["betas"]) == ("adam", (0.8, 0.9))
    assert (config.recipe.schedule.options["total_steps"], config.output.log_interval, config.recipe.seed) == (5, 7, 4)
    for last in ("last", "auto"):
        assert continued("--resume", last, "--name", "mine", "--out", str(tmp_path)).recipe.epochs == 9
    assert continued("--resume", "auto", "--out", str(tmp_path)).recipe.epochs == 2  # no such run yet
    moved = run.rename(tmp_path / "moved")
    assert continued("--resume", str(moved / "checkpoints" / "last.ckpt")).recipe.epochs == 9


@pytest.mark.parametrize(
    ("recipe", "flags", "strategy"),
    [
        ("", "", "deepspeed_stage_3"),
        ("", "--strategy auto", "deepspeed_stage_3"),
        ("", "--strategy deepspeed_stage_3", "deepspeed_stage_3"),
        ("", "--strategy ddp", "ddp"),
        ("ddp", "", "ddp"),
        ("auto", "", "deepspeed_stage_3"),
        ("ddp", "--strategy auto", "deepspeed_stage_3"),
        ("auto", "--strategy ddp", "ddp"),
        ("ddp", "--strategy deepspeed_stage_3", "deepspeed_stage_3"),
    ],
)
def test_a_resumed_run_keeps_the_options_of_its_strategy_only_under_that(
    recipe: str, flags: str, strategy: str, tmp_path: Path
):
    """The later of the recipe and the flags chooses the strategy. With auto, it is that of the earlier run."""
    zero = ["--strategy", "deepspeed_stage_3", "--zero.sub_group_size", "1000"]
    run, file = run_of(tmp_path, *zero, "--precision", "bf16-mixed"), tmp_path / "recipe.yaml"
    file.write_text(f"strategy: {recipe}\n" if recipe else "{}\n")
    placement = continued("--resume", str(run), "--config", str(file), *flags.split()).placement
    assert (placement.strategy, placement.precision) == (strategy, "bf16-mixed")
    assert placement.zero == (ZeROConfig(sub_group_size=1000) if strategy == "deepspeed_stage_3" else ZeROConfig())


def test_last_does_not_name_a_run_whose_strategy_is_auto():
    with pytest.raises(UsageError, match="--resume last with --strategy auto: also give --name"):
        continued("--resume", "last", "--strategy", "auto")


@pytest.mark.parametrize("more", [(), ("--resume", "auto"), ("--resume", "another")])
def test_a_requeued_slurm_job_resumes_its_own_run(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A job that is requeued before its first checkpoint starts as it did the first time."""
    another = checkpoint_of(tmp_path, "another")
    flags = [str(another) if flag == "another" else flag for flag in more]
    as_submitted = str(another) if "another" in more else ""
    assert resumed(tmp_path, *flags) == as_submitted
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert resumed(tmp_path, *flags) == as_submitted
    (tmp_path / "mine" / "version_0").mkdir(parents=True)
    assert resumed(tmp_path, *flags) == as_submitted
    (tmp_path / "mine" / "version_0").rmdir()
    monkeypatch.setattr("sys.argv", ["train.py", "--schedule", "constant"])  # another command of the job
    other = checkpoint_of(tmp_path, "mine", 1, job=rank_environment.slurm_job())  # of the same name
    monkeypatch.setattr("sys.argv", ["train.py", "--schedule", "cosine"])
    assert resumed(tmp_path, *flags) == (str(other) if "auto" in more else as_submitted)
    own = checkpoint_of(tmp_path, "mine", 0, job=rank_environment.slurm_job())
    os.utime(own, (0, 0))
    assert resumed(tmp_path, *flags) == str(own)
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    assert resumed(tmp_path, *flags) == (str(other) if "auto" in more else as_submitted)


def test_resume_last_takes_a_run_on_the_digits_only_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run fell back from CIFAR-10 to the digits. A requeued SLURM job resumes its own run in any case."""
    with monkeypatch.context() as in_job:
        in_job.setenv("SLURM_JOB_ID", "7")
        digits = checkpoint_of(tmp_path, "mine-digits-fallback", job=rank_environment.slurm_job())
    for source in ("auto", "cifar10"):
        with pytest.raises(UsageError, match=r"digits, not CIFAR-10: continue it with --resume .*-digits-fallback"):
            resumed(tmp_path, "--resume", "last", "--data.source", source)
        assert resumed(tmp_path, "--resume", "auto", "--data.source", source) == ""
    assert resumed(tmp_path, "--resume", "last", "--data.source", "digits") == str(digits)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert resumed(tmp_path) == str(digits)
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    own = checkpoint_of(tmp_path, "mine")
    os.utime(own.parent.parent.parent, (0, 0))
    assert resumed(tmp_path, "--resume", "last") == str(own)


@pytest.mark.parametrize("source", ["digits", "cifar10"])
def test_a_run_that_chose_its_images_continues_on_them(source: SourceName):
    """This holds whether or not CIFAR-10 has become available."""
    config = command_line.parse(["--resume", "last.ckpt", "--data.source", "auto"])
    check_same_run(config, tree_of(command_line.parse(["--data.source", source])))
    actual = config.with_images_of(source)
    assert (actual.data.source, actual.fell_back) == (source, source == "digits")


def test_a_run_on_a_folder_does_not_continue_on_other_images():
    config = command_line.parse(["--resume", "last.ckpt", "--data.source", "auto"])
    fixes = "--data.source folder, not auto: .* --weights last.ckpt and without --resume"
    with pytest.raises(UsageError, match=fixes):
        check_same_run(config, tree_of(command_line.parse(["--data.source", "folder"])))


def test_a_resumed_run_trains_the_same_parameters(tmp_path: Path):
    tuned = ["--lora.rank", "2", "--lora.target", "fc1", "--trainable", "fc3.*"]
    before = tree_of(command_line.parse([*tuned, "--weights", str(tmp_path / "base" / "last.ckpt")]))
    same = [*tuned, "--resume", "run"]
    check_same_run(command_line.parse(same), before)
    check_same_run(command_line.parse([*same, "--weights", str(tmp_path / "base")]), before)  # as after a SLURM requeue
    with pytest.raises(UsageError, match="continues with the weights of its checkpoint: remove --weights"):
        check_same_run(command_line.parse([*same, "--weights", str(tmp_path / "other.pt")]), before)
    with pytest.raises(UsageError, match=r"--lora\.rank 2, not 4"):
        check_same_run(command_line.parse([*same, "--lora.rank", "4"]), before)
    with pytest.raises(UsageError, match="--trainable"):
        check_same_run(command_line.parse([*same, "--trainable", "fc2.*"]), before)
