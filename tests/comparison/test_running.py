from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from comparison.running import Runner, steps_done

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


def test_ctrl_c_ends_the_run_and_what_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is asked, and may save; a process that it leaves behind is killed."""
    child = (
        f"import subprocess, sys; child = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(99)'])"
    )
    what = f"{child}\ntry: print(child.pid, flush=True); time.sleep(99)\nexcept KeyboardInterrupt: print('saved')"

    def interrupted(self: Runner, process: subprocess.Popen[bytes], *_: str) -> None:
        while "\n" not in (tmp_path / "a.log").read_text():
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "_watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner(tmp_path).run("a variant", "a", ("-c", f"import time\n{what}"), [])
    pid, saved = (tmp_path / "a.log").read_text().split()
    assert saved == "saved"
    psutil.wait_procs([psutil.Process(int(pid))] if psutil.pid_exists(int(pid)) else [], timeout=5)
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE


def test_how_far_a_run_is(tmp_path: Path) -> None:
    assert steps_done(tmp_path) == 0
    file = tmp_path / "losses.csv"
    file.write_text("step,loss\n")
    assert steps_done(tmp_path) == 0
    file.write_text("step,loss\n" + "".join(f"{step},2.302585092994046\n" for step in range(1, 31)))
    assert steps_done(tmp_path) == 30
