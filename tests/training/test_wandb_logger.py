"""--logger wandb without a connection: W&B's offline mode, and the error if nobody is logged in."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from wandb.errors import CommError
from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

from cifar_zero.checkpoints import run_folder
from cifar_zero.config import command_line
from cifar_zero.core.errors import RunError
from cifar_zero.training import build
from cifar_zero.training.wandb_logger import wandb_logger
from tests.support.helpers import assert_ok, run_folder_of, run_program

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
    done = run_program("train.py", *flags, "--logger", "tensorboard", "wandb", env=env)
    assert_ok(done)
    assert "warning" not in (done.stdout + done.stderr).lower()
    run = run_folder_of(tmp_path / "out")
    assert list(run.glob("events.out.tfevents.*"))
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    history: dict[str, dict[int, float]] = {}
    configuration: dict[str, Any] = {}
    project = ""
    for record in records(file):
        if record.HasField("run"):
            configuration |= values(record.run.config.update)
            project = record.run.project
        elif record.HasField("history"):
            row = values(record.history.item)
            for name, value in row.items():
                history.setdefault(name, {})[row["trainer/global_step"]] = value
    metrics = json.loads((run / run_folder.METRICS).read_text())
    assert project == "cifar-zero"
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
    done = run_program("train.py", *flags, env=env, timeout=60)  # it must not wait for an answer
    assert done.returncode == 2, done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "Traceback" not in done.stderr
    assert "wandb login" in line
    assert "WANDB_MODE=offline" in line
    assert not list(tmp_path.rglob("version_*"))


def test_a_server_that_does_not_answer_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def init(**_: Any) -> None:
        raise CommError("Timed out\nConsider increasing the init_timeout setting")

    monkeypatch.setattr(wandb, "init", init)
    (tmp_path / run_folder.CONFIG).write_text("seed: 0")
    with pytest.raises(RunError, match=r"Timed out; WANDB_MODE=offline[^\n]*$"):
        wandb_logger(tmp_path)


def test_only_rank_0_opens_a_run():
    assert build._loggers(command_line.parse(["--logger", "wandb"]), run_dir=None) == []
