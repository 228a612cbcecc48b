"""Tests cifar-zero doctor as a user starts it, also on machines that lack something."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cifar_zero.diagnosis.doctor import CHECKS
from tests.support.helpers import (
    HANG_SECONDS,
    ROOT,
    assert_ok,
    has_ended,
    of_test_all,
    run_program,
    wait_until,
)


def lines_of(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """Returns the status and the text of each printed finding, by the name of its check."""
    found = re.findall(r"^(ok|warning|failed) +(\S+) +(\S.*)$", done.stdout, re.MULTILINE)
    return {name: (status, text) for status, name, text in found}


@of_test_all
def test_this_machine_is_fit():
    done = run_program("doctor", "--json", "--timeout", str(HANG_SECONDS))
    assert_ok(done)
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["schema"] == 2
    assert [check["name"] for check in answer["checks"]] == [*CHECKS]
    for check in answer["checks"]:
        assert set(check) == {"name", "status", "summary", "fix", "bugs"}
        assert bool(check["fix"]) == (check["status"] == "warning"), check


def test_each_check_prints_one_line():
    done = run_program("doctor", "all-reduce", "memory", "out", "--ranks", "1")
    assert_ok(done)
    assert [*lines_of(done)] == ["all-reduce", "memory", "out"]
    assert {status for status, _ in lines_of(done).values()} == {"ok"}
    assert done.stdout.splitlines()[3:] == ["Nothing failed; warnings: 0."]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("memroy", "unknown check memroy: did you mean memory?"),
        ("--ranks 0", "--ranks must be at least 1"),
        ("--nodes", "start it on each node with torchrun --nnodes N --nproc_per_node M --rdzv_backend c10d"),
        ("--nodes memory", "--nodes cannot be combined with the name of a check"),
    ],
)
def test_wrong_usage_is_reported_in_one_line(flags: str, said: str):
    done = run_program("doctor", *flags.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("package", "release", "status", "count", "said"),
    [
        ("deepspeed", "0.18.3", "failed", 10, "deepspeed_* divides gradients by --accumulate twice: https://"),
        ("deepspeed", "0.19.5", "warning", 2, "contiguous_gradients false loses an all-reduce on a CPU: https://"),
        ("lightning", "2.6.3", "failed", 2, "it steals credentials: https://github.com/Lightning-AI/"),
    ],
)
def test_each_bug_of_a_release_has_a_line(
    package: str, release: str, status: str, count: int, said: str, tmp_path: Path
):
    metadata = tmp_path / f"{package}-{release}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
    done, strict = (
        run_program("doctor", package, *more, env={"PYTHONPATH": str(tmp_path)}) for more in ([], ["--strict"])
    )
    assert (done.returncode, strict.returncode) == (int(status == "failed"), 1)
    found, text = lines_of(done)[package]
    assert (found, len(text) < 150) == (status, True)
    bugs = re.findall("^ +- (.*)$", done.stdout, re.MULTILINE)
    assert len(bugs) == count
    assert any(bug.startswith(said) for bug in bugs)


def test_a_missing_compiler_is_reported(tmp_path: Path):
    done = run_program("doctor", "compiler", env={"PATH": str(tmp_path), "CXX": "c++"})
    assert_ok(done)  # runs without offload need none
    status, text = lines_of(done)["compiler"]
    assert status == "warning"
    assert "no c++ on PATH, " in text
    assert "no ninja on PATH" in text
    assert "libaio" not in text.split("; the *_offload strategies need it")[0]
    assert ": apt-get install g++; " in text


def test_a_rank_that_never_answers_is_named():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cifar_zero", "doctor", "all-reduce", "--timeout", "3"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as doctor:
        wait_until(lambda: ranks_of(doctor.pid).get("1"))
        frozen = ranks_of(doctor.pid)["1"]
        frozen.suspend()
        said, _ = doctor.communicate(timeout=HANG_SECONDS)
    assert doctor.returncode == 1
    assert "rank 0: error: rank 1 did not connect within 3 s" in said
    assert has_ended(frozen.pid)


def ranks_of(doctor: int) -> dict[str, psutil.Process]:
    found = {}
    for process in psutil.Process(doctor).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "--nodes" in process.cmdline():
                found[process.environ().get("RANK")] = process
    return found
