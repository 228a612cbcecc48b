"""A CPU run says so when other programs take its cores; its own processes do not count."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cifar_zero.core.hardware import core_count
from cifar_zero.training.cpu_contention import Usage, warn
from tests.support.helpers import assert_ok, run_program

SIBLING = """
import sys, time
import psutil
from cifar_zero.training.cpu_contention import usage
busy = [psutil.Process(int(number)) for number in sys.argv[1:]]
def used():
    return sum(sum(process.cpu_times()[:2]) for process in busy)
before, used_before = usage(), used()
while used() < used_before + 1:
    time.sleep(0.2)
print(usage().own - before.own)
"""


@pytest.fixture
def busy() -> Iterator[list[str]]:
    """A busy process for each core; returns their numbers."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(core_count())]
    yield [str(program.pid) for program in programs]
    for program in programs:
        program.kill()
        program.wait()


@pytest.mark.parametrize(
    ("seconds", "busy", "own", "line"),
    [
        (10, 20, 2, "other programs use 1.8 of the 2 cores: steps will be slower\n"),
        (10, 20, 18, ""),
        (10, 10, 0, ""),
        (0.5, 1, 0, ""),
    ],
)
def test_more_than_half_of_the_cores(
    seconds: float, busy: float, own: float, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    warn(Usage(100, 2, 50, 7), Usage(100 + seconds, 2, 50 + busy, 7 + own))
    assert capsys.readouterr().err == line


def test_the_other_ranks_are_no_other_programs(busy: list[str]) -> None:
    """The busy processes have the same parent as this rank."""
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for env, counts in ((rank, True), ({}, False)):
        done = run_program("-c", SIBLING, *busy, env=env)
        assert_ok(done)
        assert (float(done.stdout) > 0.5) == counts


@pytest.mark.usefixtures("busy")
def test_a_run_next_to_busy_programs_says_so(tmp_path: Path, small_data: list[str]) -> None:
    done = run_program(
        "train.py", *small_data, "--bench_steps", "1", "--out", str(tmp_path), "--accelerator", "cpu", env={}
    )
    assert_ok(done)
    assert done.stderr.count("other programs use ") == 1
