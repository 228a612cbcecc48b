from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from cifar_zero.comparison.running import Runner
from cifar_zero.core.errors import RunError
from tests.support.helpers import ROOT

PROGRAM = "import signal, sys, time; print('error: the first'); {what}"


def runner(folder: Path) -> Runner:
    return Runner(folder, runs=2)


def test_a_failed_run_is_reported_with_its_last_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    what = "print('error: the last', file=sys.stderr); print('more'); sys.exit(1)"
    with pytest.raises(RunError, match=r"^the last$"):
        runner(tmp_path).run("a", ("-c", PROGRAM.format(what=what)), [])
    said = capfd.readouterr().err
    assert "[1/2] a: training, see " in said
    assert "a: the last" in said


def test_a_run_without_an_error_line_is_reported_by_its_signal(tmp_path: Path) -> None:
    what = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RunError, match=r"^signal SIGKILL$"):
        runner(tmp_path).run("a", ("-c", what), [])


RANKS = """
import signal, subprocess, sys, time
rank = "import time\\ntry: print('ready', flush=True); time.sleep(99)\\nexcept KeyboardInterrupt: print('saved')"
stubborn = "from signal import *; import time; signal(SIGINT, SIG_IGN); print('ready', flush=True); time.sleep(99)"
signal.signal(signal.SIGINT, lambda *_: None)
ranks = [subprocess.Popen([sys.executable, "-I", "-S", "-c", code]) for code in (rank, stubborn)]
print(ranks[1].pid, flush=True)
ranks[0].wait()
"""
"""A launcher that forwards no signal, as supervisor.py does for Ctrl-C: a terminal sends it to the ranks directly."""


def interrupted(monkeypatch: pytest.MonkeyPatch, folder: Path, impatient: bool = False) -> list[str]:
    """Ends a run of RANKS by Ctrl-C when both are ready; returns its output. The stubborn process must have ended."""
    wait = subprocess.Popen.wait

    def interrupt(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None and self.poll() is None:
            while (folder / "a.log").read_text().count("\n") < 3:
                time.sleep(0.02)
            raise KeyboardInterrupt
        if impatient and timeout is not None:
            raise KeyboardInterrupt
        return wait(self, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner(folder).run("a", ("-I", "-S", "-c", RANKS), [])
    words = (folder / "a.log").read_text().split()
    pid = next(int(word) for word in words if word.isdigit())
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=5)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return words


def test_ctrl_c_interrupts_all_ranks_and_kills_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "saved" in interrupted(monkeypatch, tmp_path)


def test_a_second_ctrl_c_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(monkeypatch, tmp_path, impatient=True)


def test_a_run_finds_this_repository_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the same name in the user's directory is not imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checks.py").write_text("print('error: the wrong one'); raise SystemExit(3)")
    with pytest.raises(RunError, match="--devices"):
        runner(tmp_path).run("a", [str(ROOT / "compare.py"), "perturb"], ["--devices", "none"])
