"""sweep.py as a user starts it: what it refuses, and a real sweep that is started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

from cifar_zero.core.errors import UsageError
from cifar_zero.sweeping import sweep
from tests.support.helpers import HANG_SECONDS, ROOT, WHOLE, of_make_fuzz, run_program, wait_until

pytestmark = pytest.mark.usefixtures("signal_handlers")


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr("sys.argv", ["sweep.py", *flags])
    return sweep.main()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--search optimizer.lr=0.1..1.0 --sampler grid", "a grid is all combinations of values"),
        ("--search optimizer.lr=0.1,1 --trials 5", "a grid is all combinations of values"),
        ("--search optimizer.lr=0.1..1 --trials 0", "--trials and --parallel must be at least 1"),
        ("--search optimizer.lr=0.1,1 --metric train/loss --prune", "--prune reads val/acc"),
        ("--search optimizer.lr=0.1,1 --metric test/acc", "invalid choice: 'test/acc'"),
        ("--search optimizer.lr=0.1,1 --name a/b", "must be a plain name"),
        ("--search optimizer.lr=0.1..1.0 optimizer=sgd,adm", "did you mean adam"),
        ("--search batch_size=16,32 accumulate=1,32", "accumulate 32 gives no whole micro-batch"),
        ("--search epochs=1.5..2.5", "expected int"),
        ("--search out=a,b", "--search out: sweep.py sets it itself for each run"),
    ],
)
def test_what_it_refuses(
    flags: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_data: list[str]
) -> None:
    out = tmp_path / "sweeps"
    with pytest.raises(UsageError, match=message):
        run(monkeypatch, *flags.split(), *small_data, "--batch_size", "16", "--out", str(out))
    assert not out.exists()


def test_wrong_usage_is_reported_in_one_line() -> None:
    done = run_program("sweep.py", "--search", "optimizer.lrr=0.1,1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown option --optimizer.lrr: did you mean --optimizer.lr?\n"


def test_a_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_data: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    rates = ["0.01", "0.02"] if WHOLE else ["0.01"]  # a run takes nine seconds of a processor to start and end
    flags = [
        "--search",
        f"optimizer.lr={','.join(rates)}",
        "model.name=net",
        *small_data,
        "--batch_size",
        "16",
        "--epochs",
        "1",
    ]
    flags += ["--trainer.limit_train_batches", "2", "--trainer.limit_test_batches", "1"]
    flags += ["--accelerator", "cpu", "--parallel", "2", "--out", str(tmp_path), "--name", "rates"]
    assert run(monkeypatch, *flags) == 0
    folder = tmp_path / "rates"
    content = json.loads((folder / "sweep.json").read_text())
    means = [setting["mean"] for setting in content["settings"]]
    assert means == sorted(means, reverse=True)
    assert content["best_command"] in capfd.readouterr().out
    for setting in content["settings"]:
        metrics = json.loads((Path(setting["runs"][0]["folder"]) / "metrics.json").read_text())
        assert metrics["val/acc"] == setting["mean"]

    curves = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    assert sorted(curves.Runs()) == [f"optimizer.lr_{lr}-model.name_net/version_0" for lr in rates]
    for name in curves.Runs():
        hparams = curves.SummaryMetadata(name, "_hparams_/session_start_info").plugin_data.content
        assert b"optimizer.lr" in hparams

    monkeypatch.setattr("cifar_zero.training.run_process.start", None)  # nothing is left to start
    assert run(monkeypatch, *flags) == 0
    assert json.loads((folder / "sweep.json").read_text()) == content


@of_make_fuzz
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_sweep_continues(number: int, tmp_path: Path, small_data: list[str]) -> None:
    """Whatever ended it, the second start resumes from checkpoints, and every run trains each step once."""
    command = [sys.executable, "sweep.py", "--search", "optimizer.lr=0.01,0.02", *small_data]
    command += ["--batch_size", "4", "--epochs", "8", "--log_interval", "10", "--accelerator", "cpu"]
    command += ["--parallel", "2", "--out", str(tmp_path), "--name", "rates"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    while not any(tmp_path.glob("rates/*/version_0/checkpoints/last.ckpt")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(HANG_SECONDS) in (128 + number, -number)

    def nothing_is_left() -> bool:
        lines = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
        return not [line for line in lines if str(tmp_path / "rates") in line]

    wait_until(nothing_is_left)
    assert subprocess.run(command, cwd=ROOT, env=environment).returncode == 0
    content = json.loads((tmp_path / "rates" / "sweep.json").read_text())
    assert [setting["state"] for setting in content["settings"]] == ["complete"] * 2
    assert any(setting["runs"][0]["folder"].endswith("version_1") for setting in content["settings"])
    for setting in content["settings"]:
        losses = (Path(setting["runs"][0]["folder"]) / "losses.csv").read_text().splitlines()
        assert losses[-1].split(",")[0] == "1160"  # of 580 images in batches of 4
