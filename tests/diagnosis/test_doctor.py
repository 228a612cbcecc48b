"""Tests cifar-zero doctor as a user starts it, also on machines that lack something, and with --nodes on two ranks."""

import contextlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from cifar_zero.diagnosis import machine, nodes
from cifar_zero.diagnosis.doctor import CHECKS
from cifar_zero.launch.local_launcher import free_port, variables
from tests.support.helpers import (
    HANG_SECONDS,
    ROOT,
    assert_ok,
    has_ended,
    of_test_all,
    run_program,
    wait_until,
)


def lines_of(output: str) -> dict[str, tuple[str, str]]:
    """Returns the status and the text of each printed finding, by the name of its check."""
    lines = re.findall(r"^(ok|warning|failed) +(\S+) +(\S.*)$", output, re.MULTILINE)
    return {name: (status, text) for status, name, text in lines}


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


@of_test_all
def test_neither_output_of_the_ranks_nor_the_out_folder_disturbs_the_all_reduce(tmp_path: Path):
    """Ranks print more than a pipe takes, as NCCL does with NCCL_DEBUG. Not even root can write to /proc."""
    lines = "import os, sys, atexit\nif 'RANK' in os.environ:\n"
    for stream in ("sys.stdout", "sys.stderr"):
        lines += f"    print('NCCL INFO {{\\n' * 20_000, file={stream}, flush=True)\n"
    lines += "    atexit.register(print, 'NCCL INFO ends')\n"
    (tmp_path / "sitecustomize.py").write_text(lines)
    flags = ["all-reduce", "--out", "/proc/nothing", "--timeout", str(HANG_SECONDS)]
    done = run_program("doctor", *flags, env={"PYTHONPATH": str(tmp_path)})
    assert_ok(done)
    assert lines_of(done.stdout)["all-reduce"][0] == "ok"


def test_ranks_that_print_a_warning_and_hang_are_called_slow(
    run_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines = "import os, sys, time\nif 'RANK' in os.environ:\n    print('a warning', file=sys.stderr, flush=True)\n"
    (tmp_path / "sitecustomize.py").write_text(lines + "    time.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, seconds in (("START_SECONDS", 1), ("STEPS", 0), ("GRACE_SECONDS", 0)):
        monkeypatch.setattr(machine, name, seconds)
    code, output, _ = run_command("doctor", "all-reduce", "--ranks", "2")
    assert (code, lines_of(output)["all-reduce"][0]) == (1, "failed")
    assert "the ranks did not end within 1 s" in output


def test_decoded_images_need_no_archive(run_command, tmp_path: Path):
    assert "no images in" in run_command("doctor", "data", "--data.root", str(tmp_path))[1]
    decoded = tmp_path / ".cifar-zero" / "cifar10" / "meta.json"
    decoded.parent.mkdir(parents=True)
    decoded.touch()
    assert "cifar10: decoded images" in run_command("doctor", "data", "--data.root", str(tmp_path))[1]


def test_each_check_prints_one_line(run_command):
    code, output, _ = run_command("doctor", "all-reduce", "memory", "out", "--ranks", "1")
    assert code == 0
    assert [*lines_of(output)] == ["all-reduce", "memory", "out"]
    assert {status for status, _ in lines_of(output).values()} == {"ok"}
    assert output.splitlines()[3:] == ["Nothing failed; warnings: 0."]


@pytest.mark.parametrize(
    ("package", "release", "status", "count", "said"),
    [
        ("deepspeed", "0.18.3", "failed", 10, "deepspeed_* divides gradients by --accumulate twice: https://"),
        ("deepspeed", "0.19.5", "warning", 2, "contiguous_gradients false loses an all-reduce on a CPU: https://"),
        ("lightning", "2.6.3", "failed", 2, "it steals credentials: https://github.com/Lightning-AI/"),
    ],
)
def test_each_bug_of_a_release_has_a_line(
    package: str,
    release: str,
    status: str,
    count: int,
    said: str,
    run_command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    metadata = tmp_path / f"{package}-{release}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, output, _ = run_command("doctor", package)
    assert (code, run_command("doctor", package, "--strict")[0]) == (int(status == "failed"), 1)
    actual, text = lines_of(output)[package]
    assert (actual, len(text) < 150) == (status, True)
    bugs = re.findall("^ +- (.*)$", output, re.MULTILINE)
    assert len(bugs) == count
    assert any(bug.startswith(said) for bug in bugs)


def test_a_missing_compiler_is_reported(run_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    code, output, _ = run_command("doctor", "compiler")
    assert code == 0  # runs without offload need none
    status, text = lines_of(output)["compiler"]
    assert status == "warning"
    assert "no c++ on PATH, " in text
    assert "no ninja on PATH" in text
    assert "libaio" not in text.split("; the *_offload strategies need it")[0]
    assert ": apt-get install g++; " in text


def test_a_rank_that_never_answers_is_named():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cifar_zero", "doctor", "all-reduce", "--timeout", "3"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as started:
        wait_until(lambda: ranks_of(started.pid).get("1"))
        frozen = ranks_of(started.pid)["1"]
        frozen.suspend()
        said, _ = started.communicate(timeout=HANG_SECONDS)
    assert started.returncode == 1
    assert "rank 0: error: rank 1 did not connect within 3 s" in said
    assert has_ended(frozen.pid)


def ranks_of(process_id: int) -> dict[str, psutil.Process]:
    ranks = {}
    for process in psutil.Process(process_id).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "--nodes" in process.cmdline():
                ranks[process.environ().get("RANK")] = process
    return ranks


@of_test_all
@pytest.mark.distributed
def test_two_ranks_that_do_not_share_a_disk(tmp_path: Path):
    port = free_port()

    def diagnose(rank: int) -> Any:
        folder = tmp_path / str(rank)
        folder.mkdir()
        flags = ["--nodes", "--timeout", str(HANG_SECONDS), "--out", "runs"]
        return run_program("doctor", *flags, cwd=folder, env=variables(rank, 2, port))

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(diagnose, (0, 1))
    assert (first.returncode, other.returncode, other.stdout) == (1, 0, ""), first.stdout  # only rank 0 reports
    assert "1 MiB over gloo, with the correct sum on every rank" in first.stdout
    assert "runs is not the same directory on " in first.stdout
    assert "These nodes are not ready to train together: 1 check failed" in first.stdout
    assert not [*tmp_path.glob("*/*")]


def test_versions_that_differ_fail_and_are_named():
    names = ["gpu0", "gpu1", "gpu2"]
    old, new = {"torch": "2.14.0"}, {"torch": "2.15.0"}
    finding = nodes.check_versions(names, [new, old, new])
    assert finding.status == "failed"
    assert "torch 2.15.0 on gpu0, 2.14.0 on gpu1, 2.15.0 on gpu2" in finding.summary
    assert nodes.check_versions(names, [new] * 3).status == "ok"
    assert nodes.check_versions(["ubuntu"] * 2, [old, new]).status == "failed"  # cloned machines
    missing = nodes.check_versions(names[:2], [{**new, "nccl": "2.27.3"}, new])
    assert "nccl 2.27.3 on gpu0, none on gpu1" in missing.summary
