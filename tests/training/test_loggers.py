"""Tests the loggers of a run, which are CSV and W&B without a connection."""

import csv
import re
from pathlib import Path

import pytest

from cifar_zero.checkpoints import run_folder
from tests.support.helpers import assert_ok, metrics_of, of_test_all, run_folder_of, run_program, small_disk

FLAGS = ["--batch_size", "16", "--accelerator", "cpu", "--max_steps", "20", "--log_interval", "10"]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Returns environment variables with which W&B uses only the test's folder and has no login."""
    own = {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
    return {**own, "WANDB_DIR": str(folder), "NETRC": str(folder / "netrc"), "WANDB_API_KEY": "", **more}


def test_each_logger_has_curves_and_results(small_data: list[str], tmp_path: Path):
    flags = [*small_data, *FLAGS, "--optimizer.lr", "0.01", "--out", str(tmp_path / "out")]
    env = environment(tmp_path, WANDB_MODE="offline", WANDB_RUN_GROUP="rates")
    done = run_program("train.py", *flags, "--logger", "csv", "wandb", "--wandb_project", "mine", env=env)
    assert_ok(done)
    run = run_folder_of(tmp_path / "out")
    with (run / "csv" / "metrics.csv").open() as file:
        rows = [*csv.DictReader(file)]
    metrics = metrics_of(run)
    losses = {int(row["step"]): float(row["train/loss"]) for row in rows if row["train/loss"]}
    assert [*losses] == [10, 20]
    assert losses[20] == pytest.approx(metrics["train/loss"])
    assert [float(row["test/acc"]) for row in rows if row["test/acc"]] == [pytest.approx(metrics["test/acc"])]
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    written = file.read_bytes()
    for text in ("mine", "rates", "train/loss", "test/acc", "perf/fit_seconds", "optimizer", "batch_size"):
        assert text.encode() in written, text


@of_test_all
def test_a_missing_login_is_reported_in_one_line(small_data: list[str], tmp_path: Path):
    env = environment(tmp_path, WANDB_MODE="online")
    flags = [*small_data, *FLAGS, "--out", str(tmp_path), "--logger", "wandb"]
    done = run_program("train.py", *flags, env=env)  # it must not wait for an answer
    assert done.returncode == 2, done.stderr[-2000:]
    assert re.search("^error: .*wandb login.*WANDB_MODE=offline", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("version_*"))


def test_a_full_disk_does_not_end_the_training(small_data: list[str], tmp_path: Path):
    """Neither losses.csv nor a logger can be written. Each failure is reported once, and the results are printed."""
    flags = ["--batch_size", "2", "--max_steps", "280", "--log_interval", "1", "--accelerator", "cpu"]
    flags += ["--logger", "tensorboard", "csv", "--test_figures", "true"]
    with small_disk(tmp_path, "64k") as disk:
        done = run_program("train.py", *small_data, *flags, "--out", str(disk))
        kept = (run_folder_of(disk) / run_folder.LOSSES).read_text().splitlines()
    assert done.returncode == 1, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    for what in ("losses.csv", "what TensorBoardLogger logs", "what CSVLogger logs"):
        assert done.stderr.count(f"{what} could not be written: No space left on device. The training continues") == 1
    assert "last.ckpt could not be written: No space left on device" in done.stderr.splitlines()[-1]
    assert kept[1].startswith("1,")
    assert "280 of 2 images" in done.stdout
