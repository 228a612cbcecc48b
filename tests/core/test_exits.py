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


def test_a_background_job_of_a_script_still_ignores_ctrl_c(signal_handlers: None):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exits.install()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
