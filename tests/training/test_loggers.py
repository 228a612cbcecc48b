"""The loggers of a run: CSV and W&B without a
connection: offline mode, and the error if nobody is logged in."""

import csv
import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

from cifar_zero.checkpoints import run_folder
from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from cifar_zero.training.loggers import loggers
from cifar_zero.training.resolve import resolve
from tests.support.helpers import assert_ok, run_folder_of, run_program, small_disk, train_all

FLAGS = ["--batch_size", "16", "--accelerator", "cpu", "--max_steps", "20", "--log_interval", "10"]
BLOCK = 32_768
"""Bytes of a block of LevelDB's log format, in which W&B stores a run."""


def records(file: Path) -> Iterator[Record]:
    """Yields the records of a .wandb file: 7 bytes of W&B's, then LevelDB's (checksum, length, whole or part)."""
    content, position, parts = file.read_bytes(), 7, b""
    while position < len(content):
        if BLOCK - position % BLOCK < 7:  # no room for another header in this block
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Returns variables with which W&B uses only the test's folder, and nobody is logged in."""
    own = {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
    return {**own, "WANDB_DIR": str(folder), "NETRC": str(folder / "netrc"), "WANDB_API_KEY": "", **more}


def test_an_offline_run_has_curves_and_configuration(small_data: list[str], tmp_path: Path):
    flags = [*small_data, *FLAGS, "--optimizer.lr", "0.01", "--out", str(tmp_path / "out")]
    env = environment(tmp_path, WANDB_MODE="offline")
    named = ["--wandb_project", "mine", "--wandb_group", "rates", "--wandb_tags", "a", "b", "--wandb_run_name", "first"]
    done = run_program("train.py", *flags, "--logger", "tensorboard", "wandb", *named, env=env)
    assert_ok(done)
    run = run_folder_of(tmp_path / "out")
    assert list(run.glob("events.out.tfevents.*"))
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    history: dict[str, dict[int, float]] = {}
    configuration: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    names: tuple[Any, ...] = ()
    for record in records(file):
        if record.HasField("run"):
            configuration |= values(record.run.config.update)
            names = record.run.project, record.run.run_group, record.run.display_name, [*record.run.tags]
        elif record.HasField("summary"):
            summary |= values(record.summary.update)
        elif record.HasField("history"):
            row = values(record.history.item)
            for name, value in row.items():
                history.setdefault(name, {})[row["trainer/global_step"]] = value
    metrics = json.loads((run / run_folder.METRICS).read_text())
    assert names == ("mine", "rates", "first", ["a", "b"])
    for name in ("test/loss", "perf/fit_seconds", "parameters"):
        assert summary[name] == metrics[name]
    assert list(history["train/loss"]) == [10, 20]
    assert history["train/loss"][20] == pytest.approx(metrics["train/loss"])
    assert history["test/acc"] == {20: pytest.approx(metrics["test/acc"])}
    assert "perf/data_time_ms" in history
    recipe = yaml.safe_load((run / run_folder.CONFIG).read_text())
    assert recipe["optimizer"]["lr"] == 0.01
    assert {name: value for name, value in configuration.items() if name != "_wandb"} == recipe


def test_a_missing_login_is_reported_in_one_line(small_data: list[str], tmp_path: Path):
    env = environment(tmp_path, WANDB_MODE="online")
    flags = [*small_data, *FLAGS, "--out", str(tmp_path), "--logger", "wandb"]
    done = run_program("train.py", *flags, env=env)  # it must not wait for an answer
    assert done.returncode == 2, done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "Traceback" not in done.stderr
    assert "wandb login" in line
    assert "WANDB_MODE=offline" in line
    assert not list(tmp_path.rglob("version_*"))


def test_only_rank_0_opens_a_run():
    assert loggers(resolve(command_line.parse(["--logger", "wandb", "--accelerator", "cpu"])), run_dir=None) == []


def test_a_csv_file(small_data: list[str], tmp_path: Path):
    own = ["--logger", "tensorboard", "csv"]
    train_all({tmp_path: [*small_data, *FLAGS, *own]})
    run = run_folder_of(tmp_path)
    with (run / "csv" / "metrics.csv").open() as file:
        rows = [*csv.DictReader(file)]
    metrics = json.loads((run / run_folder.METRICS).read_text())
    losses = {int(row["step"]): float(row["train/loss"]) for row in rows if row["train/loss"]}
    assert [*losses] == [10, 20]
    assert losses[20] == pytest.approx(metrics["train/loss"])
    assert [float(row["test/acc"]) for row in rows if row["test/acc"]] == [pytest.approx(metrics["test/acc"])]


def test_wandb_needs_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--logger wandb needs the package"):
        resolve(command_line.parse(["--accelerator", "cpu", "--logger", "wandb"]))


def test_a_full_disk_does_not_end_the_training(small_data: list[str], tmp_path: Path):
    """Neither losses.csv nor a logger, each of which is reported once; the results are printed."""
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
