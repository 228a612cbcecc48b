"""A run in a separate process group."""

from pathlib import Path

import pytest

from cifar_zero.training import run_process


def test_a_run_does_not_inherit_a_slurm_requeue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "SLURM_RESTART_COUNT" not in run_process._environment()


def test_a_failed_run_shows_its_traceback_with_debug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text("import sys\nif '--debug' in sys.argv:\n    raise KeyError('step')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["compare", "--debug"])
    with run_process.start(["program"], [], log) as run:
        assert run.wait() == 1
    assert run_process.failure(log, 1) == "exit code 1: KeyError: 'step'"
    assert "Traceback" in capsys.readouterr().err
