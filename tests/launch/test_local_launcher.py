"""The launcher with real processes that are quicker to start than a training."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from cifar_zero.launch import local_launcher, temporary
from tests.support.helpers import ROOT

PROGRAM = """
import os, sys, time
sys.path.insert(0, {root!r})
import signal
from cifar_zero.core import exits
from cifar_zero.launch import heartbeat, local_launcher, rank_environment, supervisor
if not rank_environment.is_rank():
    supervisor.GRACE_SECONDS, supervisor.SAVING_SECONDS = 1, 4
    heartbeat.SILENT_SECONDS = heartbeat.STOPPED_SECONDS = 2
    sys.exit(exits.guarded(lambda: local_launcher.run(3, on_cpu=True)))
rank = rank_environment.global_rank()
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
    from cifar_zero.core import hardware

    assert {int(place[5]) for place in places} == {max(1, hardware.core_count() // 3)}


def test_a_user_without_a_name_may_start_ranks(monkeypatch: pytest.MonkeyPatch):
    """As in a container that runs as a number."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 123456)
    assert local_launcher._user() == "uid_123456"


def test_a_failed_rank_ends_the_run_and_is_named(tmp_path: Path):
    started = time.monotonic()
    done = launched(tmp_path, "print('about to fail') or sys.exit(7) if rank == 2 else time.sleep(50)")
    assert done.returncode == 7
    assert "rank 2 ended with exit code 7" in done.stderr
    assert "about to fail" in done.stderr
    assert time.monotonic() - started < 40


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_with_its_signal(victim: int, tmp_path: Path):
    body = f"""
    if rank == {victim}:
        open({str(tmp_path / "dying")!r}, "w").close()
        os.kill(os.getpid(), 9)
    while not os.path.exists({str(tmp_path / "dying")!r}):
        time.sleep(0.05)
    time.sleep(0.5)
    sys.exit(1)
    """
    done = launched(tmp_path, body)
    assert done.returncode == 1
    assert done.stderr == f"error: rank {victim} ended with signal SIGKILL\n"


def test_ranks_that_wait_for_each_other_are_ended_and_show_where(tmp_path: Path):
    body = """
    pulse = heartbeat.Pulse()
    for _ in range(5 - (rank == 1)):
        pulse.beat()
    print("last words of rank", rank, flush=True)
    def waits_for_ever():
        time.sleep(50)
    waits_for_ever()
    """
    done = launched(tmp_path, body)
    assert done.returncode == 1
    assert re.match(
        r"error: rank 1 hangs: 4 batches so far, nothing for \d+ s, and the others are further", done.stderr
    )
    assert done.stderr.count("in waits_for_ever") == 3
    assert "last words of rank 1" in done.stderr


def test_a_stopped_rank_ends_the_run_whatever_it_did(tmp_path: Path):
    done = launched(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP) if rank == 2 else time.sleep(50)")
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 2 hangs: stopped by a signal")


@pytest.mark.parametrize(("request_", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_request_to_end_reaches_all_ranks_and_is_no_failure(
    request_: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    body = f"""
    if rank == 0:  # answers by itself, later than a failure would leave it time to; the others just die of the signal
        signal.signal({request_:d}, lambda *_: time.sleep(2) or print("saved", flush=True) or sys.exit({code}))
        time.sleep(1)
        os.kill(os.getppid(), {request_:d})
    time.sleep(50)
    """
    done = launched(tmp_path, body)
    assert (done.returncode, done.stdout, done.stderr) == (code, "saved\n", "")


@pytest.mark.parametrize("batches", [0, 1])
def test_ctrl_c_ends_ranks_that_start_at_once_and_leaves_it_to_those_that_train(batches: int, tmp_path: Path):
    """As from a terminal, to all processes: while a rank imports, a KeyboardInterrupt could get lost."""
    body = f"""
    if {batches}:
        signal.signal(signal.SIGINT, lambda *_: print("saved", flush=True) or sys.exit(130))
        heartbeat.Pulse().beat()
    if rank == 0:
        time.sleep(1)
        os.killpg(0, signal.SIGINT)
    time.sleep(50)
    """
    started = time.monotonic()
    done = launched(tmp_path, body, "setsid", "--wait")
    assert (done.returncode, time.monotonic() - started < 10) == (130, True), (done.stdout, done.stderr)
    assert (done.stdout, done.stderr) == (("saved\n", "") if batches else ("", "stopped by Ctrl-C\n"))


def test_a_second_ctrl_c_ends_ranks_that_do_not_answer(tmp_path: Path):
    body = """
    heartbeat.Pulse().beat()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _ in range(2 * (rank == 0)):
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(50)
    """
    done = launched(tmp_path, body)
    assert done.returncode == 130
    assert done.stderr == "Ctrl-C: the second one ended the ranks before they saved a checkpoint\n"


def test_a_rank_that_does_not_end_on_request_is_killed(tmp_path: Path):
    body = "sys.exit(143) if rank == 0 else signal.signal(signal.SIGTERM, signal.SIG_IGN) or time.sleep(50)"
    done = launched(tmp_path, body)
    assert done.returncode == 1
    assert done.stderr == "error: rank 1, rank 2 did not end on request and had to be killed\n"


def test_nothing_is_left_of_a_killed_rank(tmp_path: Path):
    body = f"""
    import subprocess
    buffer = f"/dev/shm/deepspeed_allreduce_buffer_{{os.getuid()}}_127.0.0.1_{{os.environ['MASTER_PORT']}}_{{rank}}"
    open(buffer, "w").close()
    if rank == 1:
        child = subprocess.Popen(["sleep", "50"], start_new_session=True)
        open({str(tmp_path / "left.txt")!r}, "w").write(f"{{child.pid}} {{buffer}}")
        os.kill(os.getpid(), 9)
    """
    launched(tmp_path, body)
    pid, buffer = (tmp_path / "left.txt").read_text().split()
    assert not psutil.pid_exists(int(pid))
    assert not list(Path(buffer).parent.glob(Path(buffer).name[:-1] + "*"))


def test_only_rank_0_is_heard(tmp_path: Path):
    done = launched(tmp_path, "print('rank', rank)")
    assert done.stdout.splitlines() == ["rank 0"]


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path):
    done = launched(tmp_path, "os.kill(os.getppid(), 1) if rank == 0 else None; time.sleep(1)", "nohup")
    assert done.returncode == 0, done.stderr


def test_the_next_run_removes_the_temporary_files_of_a_killed_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A launcher that lives keeps its folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    lives = [sys.executable, "-c", LAUNCHER]
    with (
        subprocess.Popen(lives, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(lives, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as alive,
    ):
        try:
            folders = [Path(launcher.stdout.readline().strip()) for launcher in (killed, alive) if launcher.stdout]
            killed.kill()
            killed.wait()
            with temporary.folder() as own:
                assert sorted(tmp_path.iterdir()) == sorted([folders[1], Path(own)])
        finally:
            killed.kill()
            alive.kill()
    with temporary.folder() as own:
        assert [*tmp_path.iterdir()] == [Path(own)]
    assert [*tmp_path.iterdir()] == []


LAUNCHER = """
import sys
import tempfile
from cifar_zero.launch import temporary
with temporary.folder() as made:
    print(made, flush=True)
    sys.stdin.read()
"""
