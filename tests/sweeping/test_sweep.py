"""Tests cifar-zero sweep as a user starts it: what it refuses, and what it trains when it is started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cifar_zero.core.console import command
from cifar_zero.core.errors import UsageError
from cifar_zero.sweeping import sweep
from cifar_zero.training import run_process
from tests.support.helpers import HANG_SECONDS, ROOT, of_test_all, wait_until

pytestmark = pytest.mark.usefixtures("signal_handlers")


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr("sys.argv", ["sweep", *flags])
    return sweep.main()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--search optimizer.lr=0.1..1 --trials 0", "--trials must be at least 1"),
        ("--search optimizer.lr=0.1,1 --name a/b", "must be a plain name"),
        ("--search batch_size=16,32 accumulate=1,32", "accumulate 32 gives no whole micro-batch"),
        ("--search seed=0,1 --resume last", "--resume cannot be used"),
        ("--search seed=0,1 --strategy auto", "name a strategy for this machine"),
        ("--search seed=0,1 --data.val_fraction 0", "add --data.val_fraction 0.1"),
    ],
)
def test_a_sweep_that_cannot_work_is_refused(
    flags: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_data: list[str]
):
    out = tmp_path / "sweeps"
    with pytest.raises(UsageError, match=message):
        run(monkeypatch, *small_data, *flags.split(), "--batch_size", "16", "--out", str(out))
    assert not out.exists()


PROGRAM = """
import json, sys
from pathlib import Path
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = Path(flags["--out"], flags["--name"], "version_0")
folder.mkdir(parents=True, exist_ok=True)
Path(flags["--out"], "order").open("a").write(flags["--name"] + "\\n")
{what}
accuracy = 0.5 + int(flags.get("--seed", 0)) / 10
(folder / "metrics.json").write_text(json.dumps({"val/acc": accuracy}))
"""

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a sweep whose runs are a short program instead of a training."""

    def carry_out(what: str, *flags: str) -> int:
        (tmp_path / "program.py").write_text(PROGRAM.replace("{what}", what))
        monkeypatch.setattr(run_process, "TRAIN", ("program",))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
        return run(monkeypatch, *flags, "--data.source", "synthetic", "--out", str(tmp_path), "--name", "sweep")

    return carry_out


def order(folder: Path) -> list[str]:
    return (folder / "sweep" / "order").read_text().split()


def test_a_failed_run_is_reported_and_tried_again(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The best setting has the best mean of its seeds."""
    flags = ["--search", "optimizer.lr=0.1,0.2", "model.name=net", "seed=0,2"]
    fails = "if flags['--optimizer.lr'] == '0.1' and flags['--seed'] == '2': sys.exit('error: no [bold] idea')"
    assert start(fails, *flags) == 1
    printed, errors = capsys.readouterr()
    assert "failed: optimizer.lr_0.1-model.name_net-seed_2: no [bold] idea" in errors
    rows = [[*map(str.strip, line.split("│")[1:-1])] for line in printed.splitlines() if line.startswith("│")]
    assert rows == [["0.2", "net", "0.6", "0.5, 0.7", "complete"], ["0.1", "net", "", "", "fail"]]
    best = command("train", "--data.source", "synthetic", "--optimizer.lr", "0.2", "--model.name", "net")
    assert f"best    {best}\n" in printed

    (tmp_path / "sweep" / "order").unlink()
    assert start("", *flags) == 0
    assert order(tmp_path) == ["optimizer.lr_0.1-model.name_net-seed_2"]


def test_a_budget_counts_sampled_settings(start: Start, tmp_path: Path):
    """A larger budget trains more settings, and the same command again trains nothing."""
    flags = ["--search", "optimizer.lr=1e-4..1e-1:log", "batch_size=16..64:16", "--trials"]
    for trials in (1, 3, 3):
        assert start("", *flags, str(trials)) == 0
        assert len(order(tmp_path)) == trials


def test_another_sweep_is_refused(start: Start):
    assert start("", "--search", "optimizer.lr=0.1") == 0
    with pytest.raises(UsageError, match="another --search or recipe: choose another --name"):
        start("", "--search", "optimizer.lr=0.1", "--epochs", "9")


@of_test_all
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_sweep_continues(number: int, tmp_path: Path, small_data: list[str]):
    """The same command again resumes from checkpoints, so that every run trains each step once."""
    started = [sys.executable, "-m", "cifar_zero", "sweep", "--search", "optimizer.lr=0.01,0.02", *small_data]
    started += ["--batch_size", "4", "--epochs", "8", "--log_interval", "10", "--accelerator", "cpu"]
    started += ["--out", str(tmp_path), "--name", "rates"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(started, cwd=ROOT, env=environment)
    wait_until(lambda: process.poll() or any(tmp_path.glob("rates/*/version_0/checkpoints/last.ckpt")))
    process.send_signal(number)
    assert process.wait(HANG_SECONDS) in (128 + number, -number)

    def nothing_is_left() -> bool:
        lines = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
        return not [line for line in lines if str(tmp_path / "rates") in line]

    wait_until(nothing_is_left)
    assert subprocess.run(started, cwd=ROOT, env=environment).returncode == 0
    for name in ("optimizer.lr_0.01", "optimizer.lr_0.02"):
        (metrics,) = tmp_path.glob(f"rates/{name}/*/metrics.json")
        assert name.endswith("2") or metrics.parent.name == "version_1"
        losses = (metrics.parent / "losses.csv").read_text().splitlines()
        assert losses[-1].split(",")[0] == "1160"  # of 580 images in batches of 4
