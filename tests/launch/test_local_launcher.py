"""Tests the launcher with real processes that start faster than a training."""

import json
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from cifar_zero.core import hardware
from tests.support.helpers import HANG_SECONDS, ROOT

PROGRAM = """
import os, sys, time
sys.path.insert(0, {root!r})
import signal
from pathlib import Path
from cifar_zero.core import exits
from cifar_zero.launch import local_launcher, rank_environment
if not rank_environment.is_rank():
    for name, seconds in {limits!r}.items():
        setattr(local_launcher, name, seconds)
    exits.run(lambda: local_launcher.run_ranks(3, on_cpu=True))
rank = rank_environment.global_rank()

def note(name):
    (Path({folder!r}) / f"{{name}}-{{rank}}").touch()

def await_note(name, *ranks):
    while not all((Path({folder!r}) / f"{{name}}-{{each}}").exists() for each in ranks):
        time.sleep(0.01)

def do_not_end():
    while True:
        time.sleep(60)

{body}
"""
"""Starts three ranks that run `body`. They wait for each other with files (notes), so that the order of events is the
same on a busy machine."""


def launched(tmp_path: Path, body: str, *before: str, **limits: float) -> subprocess.CompletedProcess[str]:
    """Runs PROGRAM to its end, started by the command `before`. `limits` are constants of the launcher, in seconds."""
    program = tmp_path / "program.py"
    body = textwrap.dedent(body)
    program.write_text(PROGRAM.format(root=str(ROOT), folder=str(tmp_path), limits=limits, body=body))
    command = [*before, sys.executable, str(program)]
    # Ctrl-C acts as in a terminal, although background jobs and pytest-xdist's workers ignore it.
    prepare = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, preexec_fn=prepare)


def test_each_rank_has_its_number_its_cores_and_a_port_that_no_other_computer_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    body = """
    import json, psutil
    from cifar_zero.launch import collectives
    collectives.connect(on_cpu=True)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    sockets = psutil.Process().net_connections("inet")
    listening = sorted({each.laddr.ip for each in sockets if each.status == "LISTEN"})
    print(json.dumps(collectives.gather([listening, *map(os.environ.get, names)])))
    """
    done = launched(tmp_path, body)
    cores = str(max(1, hardware.core_count() // 3))
    expected = [[["127.0.0.1"], str(rank), str(rank), "3", "3", cores, "lo"] for rank in range(3)]
    (line,) = done.stdout.splitlines()  # only rank 0 prints; the other ranks write into their logs
    assert json.loads(line) == expected, done.stderr


def test_a_failed_rank_ends_the_run_and_is_named(tmp_path: Path):
    body = "print('about to fail') or sys.exit(7) if rank == 2 else do_not_end()"
    done = launched(tmp_path, body, GRACE_SECONDS=0.2)
    assert done.returncode == 7
    named = ["error: rank 2 ended with exit code 7; its last lines:", "  about to fail"]
    hung = "rank 0, rank 1 did not end within 0.2 s after this error, and had to be killed"
    assert done.stderr.splitlines() == [*named, hung]


def test_a_mistake_that_all_ranks_find_is_printed_once(tmp_path: Path):
    body = """
    from cifar_zero.core.errors import UsageError
    def main():
        raise UsageError("use fewer")
    exits.run(main)
    """
    done = launched(tmp_path, body)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: use fewer\n")


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path):
    """The other ranks fail as a consequence."""
    body = f"""
    import contextlib, psutil
    process = Path({str(tmp_path / "process")!r})
    if rank == 0:
        process.write_text(str(os.getpid()))
        note("dying")
        os.kill(os.getpid(), 9)
    await_note("dying", 0)
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(int(process.read_text())).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    sys.exit(1)
    """
    done = launched(tmp_path, body)
    assert done.returncode == 1
    assert done.stderr == "error: rank 0 ended with signal SIGKILL\n"


@pytest.mark.parametrize(("request_", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_request_to_end_reaches_all_ranks_and_is_not_a_failure(
    request_: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    body = f"""
    note("starts")
    if rank == 0:  # it ends later than a failure would permit; the others die of the signal
        await_note("starts", 1, 2)  # a request that comes while ranks are started ends the launcher
        signal.signal({request_:d}, lambda *_: time.sleep(1) or print("saved", flush=True) or sys.exit({code}))
        os.kill(os.getppid(), {request_:d})
    do_not_end()
    """
    done = launched(tmp_path, body, GRACE_SECONDS=0.2, SAVING_SECONDS=HANG_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (code, "saved\n", "")


def test_ctrl_c_ends_ranks_that_start(tmp_path: Path):
    """A terminal sends Ctrl-C to all processes. If a rank does not handle it yet, it must not get lost."""
    body = """
    note("starts")
    if rank == 0:
        await_note("starts", 1, 2)
        os.killpg(0, signal.SIGINT)
        note("pressed")
    await_note("pressed", 0)
    exits.install()
    do_not_end()
    """
    done = launched(tmp_path, body, "setsid", "--wait", SAVING_SECONDS=HANG_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by Ctrl-C\n")


def test_a_second_ctrl_c_ends_ranks_that_do_not_answer(tmp_path: Path):
    body = """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    note("trains")
    if rank == 0:
        await_note("trains", 1, 2)
    while rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.1)
    do_not_end()
    """
    done = launched(tmp_path, body, GRACE_SECONDS=0.2)
    assert done.returncode == 130
    assert done.stderr == "Ctrl-C: the second Ctrl-C ended the ranks before they saved a checkpoint\n"


def test_a_rank_that_does_not_end_on_request_is_killed(tmp_path: Path):
    done = launched(tmp_path, "sys.exit(143) if rank == 0 else do_not_end()", SAVING_SECONDS=0.2)
    assert done.returncode == 1
    assert done.stderr == "error: rank 1, rank 2 did not end on request and had to be killed\n"


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path):
    done = launched(tmp_path, "os.kill(os.getppid(), 1) if rank == 0 else None; time.sleep(0.2)", "nohup")
    assert done.returncode == 0, done.stderr


def test_a_killed_launcher_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    assert launched(tmp_path, "os.kill(os.getppid(), 9) if rank == 0 else do_not_end()").returncode == -9
    assert [*temporary.iterdir()] == []
