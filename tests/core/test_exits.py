"""Tests Ctrl-C during a program's imports, signals that are ignored, and the errors that are a user's mistake."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cifar_zero.core import exits
from cifar_zero.core.errors import FaultFound
from tests.support.helpers import ROOT, run_program

DURING_IMPORT = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"


def test_ctrl_c_during_the_imports_is_one_line(tmp_path: Path, signal_handlers: None):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's workers ignore it
    (tmp_path / "yaml.py").write_text(DURING_IMPORT)
    done = run_program("train.py", env={"PYTHONPATH": str(tmp_path)}, fresh=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by Ctrl-C\n")


def test_a_signal_ends_a_program_whose_terminal_is_gone():
    program = "import os, signal; from cifar_zero.core import exits; exits.install(); os.close(2)"
    program += "; os.kill(os.getpid(), signal.SIGTERM)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 143


def test_a_background_job_of_a_script_still_ignores_ctrl_c(signal_handlers: None):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exits.install()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


PROGRAM = """
import logging, sys
from cifar_zero.core import console, exits
from cifar_zero.core.errors import RunError

def main():
    for _ in range(3):
        console.say("a message")
    print("another message" * 10_000, file=sys.stderr)
    logging.warning("a warning")
    {last}
    return 0

exits.install()
exits.run(main)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("rank", "full", "last", "code", "printed"),
    [
        (0, "stderr", "print('result')", 0, "result\n"),
        (0, "stderr", "raise RunError('x')", 1, ""),
        (0, "stdout", "print('result')", 1, "error: standard output could not be written: No space left on device\n"),
        (1, "stdout", "print('x' * 20_000)", 0, "a warning\n"),
        (1, "stdout", "raise RunError('x')", 1, "error: x\n"),
    ],
)
def test_a_full_disk_under_a_log_does_not_end_a_program(rank: int, full: str, last: str, code: int, printed: str):
    """The result of a program is not lost in silence. Only rank 0 has one."""
    with open("/dev/full", "w") as disk:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: disk}
        program = [sys.executable, "-c", PROGRAM.format(last=last)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "", "RANK": str(rank)}
        done = subprocess.run(program, cwd=ROOT, env=environment, text=True, **streams)
    assert (done.returncode, (done.stdout or done.stderr or "")[-len(printed) or None :]) == (code, printed)


@pytest.mark.parametrize(
    ("closed", "last", "code", "printed"),
    [
        ("", "print('result')", 0, "result\na warning\n"),
        (">&-", "print('result')", 0, "a warning\n"),
        ("2>&-", "print('result')", 0, "result\n"),
        ("<&- >&- 2>&-", "open('/dev/null'); os.kill(os.getpid(), signal.SIGTERM)", 143, ""),
    ],
)
def test_a_closed_stream_does_not_end_a_program(closed: str, last: str, code: int, printed: str):
    program = PROGRAM.format(last=last).replace("import logging, sys", "import logging, os, signal, sys")
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in exits.RANKS},
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code
    assert (done.stdout + done.stderr[-len("a warning\n") :])[-len(printed) or None :] == printed


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        *(("--debug", True), ("--debug --seed 1", True), ("--debug yes", True)),
        *(("--debug false", False), ("--debug no", False), ("--debug=off", False), ("--seed 1", False)),
    ],
)
def test_debug_has_the_values_of_other_flags(flags: str, wanted: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["train", *flags.split()])
    assert exits.wants_traceback() is wanted


def refused(path: str, number: int = errno.ENOTDIR) -> OSError:
    return OSError(number, "refused", path)


@pytest.mark.parametrize(
    ("arguments", "error", "code", "said"),
    [
        ("--out file", refused("file/net"), 2, "--out file: refused (file/net)"),
        ("--out=file", refused("file/net"), 2, "--out file: refused (file/net)"),
        ("", FaultFound("step 2"), 3, "step 2"),
        ("--seed 1 file", refused("file"), 2, "file: refused (file)"),
        ("--out a/b/c", refused("a/b"), 2, "--out a/b/c: refused (a/b)"),
        ("--out file", refused("file/net", errno.ENOSPC), 1, "refused (file/net)"),  # the disk is full
        ("--model net", refused("other"), 1, "refused (other)"),
        ("--to onnx", ModuleNotFoundError(name="onnx"), 2, "this command needs a package: pip install onnx"),
        ("", ModuleNotFoundError("gone", name="mine"), 1, "ModuleNotFoundError: gone (--debug shows where)"),
    ],
)
def test_a_path_or_package_that_the_user_can_mend_is_a_mistake(
    arguments: str,
    error: Exception,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def main() -> int:
        error.add_note("a note")
        raise error

    monkeypatch.setattr("sys.argv", ["export", *arguments.split()])
    assert exits.guarded(main) == code
    assert capsys.readouterr().err == f"error: {said}\na note\n"
