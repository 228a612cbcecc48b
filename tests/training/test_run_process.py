"""A run in a separate process group."""

import pytest

from cifar_zero.training import run_process


def test_a_run_does_not_inherit_a_slurm_requeue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "SLURM_RESTART_COUNT" not in run_process._environment()
