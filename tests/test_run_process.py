"""A run in a process group of its own, read while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

import run_process
from run_process import steps_done


def test_a_run_begins_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "SLURM_RESTART_COUNT" not in run_process._environment()


def test_how_far_a_run_is(tmp_path: Path) -> None:
    assert steps_done(tmp_path) == 0
    file = tmp_path / "losses.csv"
    file.write_text("step,loss\n")
    assert steps_done(tmp_path) == 0
    file.write_text("step,loss\n" + "".join(f"{step},2.302585092994046\n" for step in range(1, 31)))
    assert steps_done(tmp_path) == 30
