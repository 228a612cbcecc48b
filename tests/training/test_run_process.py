"""A run in a process group of its own."""

import pytest

from cifar_zero.training import run_process


def test_a_run_begins_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "SLURM_RESTART_COUNT" not in run_process._environment()
