"""The launcher with real processes that are quicker to start than a training."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.distributed

PROGRAM = """
import os, sys, time
sys.path.insert(0, {root!r})
import launch
if not launch.is_rank():
    sys.exit(launch.run(3, on_cpu=True))
rank = launch.global_rank()
{body}
"""


def launched(tmp_path: Path, body: str, *before: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(ROOT), body=textwrap.dedent(body)))
    return subprocess.run([*before, sys.executable, str(program)], capture_output=True, text=True, timeout=60)


def test_every_rank_has_its_place_and_its_share_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    body = f"""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")
    open({str(tmp_path)!r} + f"/{{rank}}.txt", "w").write(" ".join(os.environ[name] for name in names))
    """
    done = launched(tmp_path, body)
    assert done.returncode == 0, done.stderr
    places = [(tmp_path / f"{rank}.txt").read_text().split() for rank in range(3)]
    assert [place[:4] for place in places] == [[str(rank), str(rank), "3", "3"] for rank in range(3)]
    assert len({place[4] for place in places}) == 1
    import hardware

    assert {int(place[5]) for place in places} == {max(1, hardware.core_count() // 3)}


def test_a_failed_rank_ends_the_run_and_is_named(tmp_path: Path):
    started = time.monotonic()
    done = launched(tmp_path, "print('about to fail') or sys.exit(7) if rank == 2 else time.sleep(50)")
    assert done.returncode == 7
    assert "rank 2 ended with exit code 7" in done.stderr
    assert "about to fail" in done.stderr
    assert time.monotonic() - started < 40


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path):
    done = launched(tmp_path, "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(0.5)")
    assert done.returncode == 1
    assert "rank 1 ended with signal SIGKILL" in done.stderr


def test_only_rank_0_is_heard(tmp_path: Path):
    done = launched(tmp_path, "print('rank', rank)")
    assert done.stdout.splitlines() == ["rank 0"]


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path):
    done = launched(tmp_path, "os.kill(os.getppid(), 1) if rank == 0 else None; time.sleep(1)", "nohup")
    assert done.returncode == 0, done.stderr
