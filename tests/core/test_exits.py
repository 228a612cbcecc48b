"""Tests Ctrl-C during a program's imports, and signals that are ignored."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cifar_zero.core import exits
from tests.support.helpers import run_program

DURING_IMPORT = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"


@pytest.mark.parametrize("program", [["train.py"], ["plan"]])
def test_ctrl_c_during_the_imports_is_one_line(program: list[str], tmp_path: Path, signal_handlers: None):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's workers ignore it
    (tmp_path / "yaml.py").write_text(DURING_IMPORT)
    done = run_program(*program, env={"PYTHONPATH": str(tmp_path)}, fresh=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by Ctrl-C\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so(number: signal.Signals, signal_handlers: None):
    """A background job of a script ignores Ctrl-C, and a program under nohup ignores SIGHUP."""
    signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exits.install()
    assert signal.getsignal(number) == signal.SIG_IGN
    assert exits.guarded(lambda: signal.raise_signal(signal.SIGTERM)) == 143  # type: ignore[func-returns-value]
