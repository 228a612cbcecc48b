from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest
from rich.progress import TextColumn

from comparison import running
from comparison.running import Runner

PROGRAM = "import signal, sys, time; print('error: the first'); {what}"


def runner(folder: Path) -> Runner:
    return Runner(folder, runs=2, steps=10, batch_size=4)


def test_a_failed_run_is_told_with_its_last_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    what = "print('error: the last', file=sys.stderr); print('more'); sys.exit(1)"
    outcome = runner(tmp_path).run("a variant", "a", ("-c", PROGRAM.format(what=what)), [])
    assert (outcome.folder, outcome.error) == (None, "the last")
    assert "[1/2] a variant: the last" in capfd.readouterr().err


def test_a_run_that_says_nothing_is_told_by_its_signal(tmp_path: Path) -> None:
    what = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert runner(tmp_path).run("a variant", "a", ("-c", what), []).error == "signal SIGKILL"


RANKS = """
import signal, subprocess, sys, time
rank = "import time\\ntry: print('ready', flush=True); time.sleep(99)\\nexcept KeyboardInterrupt: print('saved')"
stubborn = "from signal import *; import time; signal(SIGINT, SIG_IGN); print('ready', flush=True); time.sleep(99)"
signal.signal(signal.SIGINT, lambda *_: None)
ranks = [subprocess.Popen([sys.executable, "-I", "-S", "-c", code]) for code in (rank, stubborn)]
print(ranks[1].pid, flush=True)
ranks[0].wait()
"""
"""A launcher that passes nothing on, as supervisor.py does with Ctrl-C: a terminal tells its ranks by itself."""


def interrupted(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """What a run of RANKS has written that Ctrl-C ended when both were ready; the stubborn process is gone."""

    def interrupt(self: Runner, process: subprocess.Popen[bytes], *_: str) -> None:
        while (folder / "a.log").read_text().count("\n") < 3:
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner(folder).run("a variant", "a", ("-I", "-S", "-c", RANKS), [])
    words = (folder / "a.log").read_text().split()
    pid = next(int(word) for word in words if word.isdigit())
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=5)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return words


def test_ctrl_c_asks_all_ranks_and_ends_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "saved" in interrupted(monkeypatch, tmp_path)


def test_a_second_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = subprocess.Popen.wait

    def impatient(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", impatient)
    interrupted(monkeypatch, tmp_path)


def test_a_run_finds_this_repository_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the user's directory has of the same name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checks.py").write_text("print('error: the wrong one'); raise SystemExit(3)")
    outcome = runner(tmp_path).run("a variant", "a", running.MOVED, ["--devices", "none"])
    assert "--devices" in outcome.error


def test_a_label_is_no_markup(tmp_path: Path) -> None:
    columns = [column for column in runner(tmp_path)._bar.columns if isinstance(column, TextColumn)]
    assert [column.markup for column in columns] == [False, False]
