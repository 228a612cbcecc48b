"""Ctrl-C at any moment of a program's start, and the threads of a program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cifar_zero.__main__ import SPINS
from cifar_zero.core import exits
from tests.support.helpers import HANG_SECONDS, ROOT, run_program

DURING_IMPORT = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"


@pytest.mark.parametrize("program", [["train.py"], ["plan"]])
def test_ctrl_c_during_the_imports_is_one_line(program: list[str], tmp_path: Path, signal_handlers: None):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's workers ignore it
    (tmp_path / "yaml.py").write_text(DURING_IMPORT)
    done = run_program(*program, env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by Ctrl-C\n")


def test_ctrl_c_during_a_later_import_does_not_get_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], signal_handlers: None
):
    """Libraries try imports; elsewhere Stopped is raised, so that what is open is closed."""
    (tmp_path / "late_import.py").write_text("from cifar_zero.core import exits\nexits.interrupt(2, None)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr("os._exit", sys.exit)

    def tries() -> int:
        try:
            import late_import  # pyright: ignore[reportMissingImports]  # noqa: F401
        except Exception:
            return 0
        return 1

    with pytest.raises(SystemExit, match="130"):
        exits.guarded(tries)
    assert exits.guarded(lambda: exits.interrupt(2, None)) == 130  # type: ignore[func-returns-value]
    assert capfd.readouterr().err == "stopped by Ctrl-C\n" * 2
    assert not exits._guarded


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so(number: signal.Signals, signal_handlers: None):
    """As in a background job of a script, or under nohup."""
    signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exits.install()
    assert signal.getsignal(number) == signal.SIG_IGN
    assert exits.guarded(lambda: signal.raise_signal(signal.SIGTERM)) == 143  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_soon_sleep_unless_the_user_says_otherwise(given: dict[str, str], spins: str | None, tmp_path: Path):
    (tmp_path / "asked.py").write_text("import os\n\n\ndef main():\n    print(os.environ.get('GOMP_SPINCOUNT'))\n")
    known = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment = {**known, **given, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code = "from cifar_zero import __main__ as commands; commands.COMMANDS['asked'] = 'asked'; commands.run('asked')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.stdout.strip() == str(spins), done.stderr
