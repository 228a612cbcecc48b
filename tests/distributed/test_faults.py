"""Runs two ranks as a user starts them, including their exit, which support/many_runs.py skips. A run ends soon and
leaves nothing behind after a rank was killed or suspended, or the launcher was killed."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cifar_zero.checkpoints.read import read
from cifar_zero.checkpoints.run_folder import find_checkpoint
from tests.support.helpers import (
    HANG_SECONDS,
    ROOT,
    assert_ok,
    largest_difference,
    last_weights,
    of_test_all,
    run_folder_of,
    run_program,
    train_all,
    train_command,
    wait_until,
)

RECIPE = [
    *("--accelerator", "cpu", "--devices", "2", "--batch_size", "64", "--epochs", "100000"),
    *("--save_every_n_steps", "5", "--logger", "none"),
]

WITH_WORKERS = ["--data.loader", "torch", "--data.workers", "1"]


class Run:
    """Runs a training on two ranks that does not end by itself, and is in the middle of its first epoch or later."""

    def __init__(self, out: Path, *flags: str):
        self._out = out
        self.temporary = Path(tempfile.mkdtemp())  # not under `out`: a socket's path has room for 107 characters
        with (out / "output.txt").open("w") as output:
            self.launcher = psutil.Popen(
                [sys.executable, "train.py", *RECIPE, "--out", str(out), *flags],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        while not list(out.glob("*/version_0/checkpoints/*.ckpt")):
            assert self.launcher.poll() is None, self.said()
            time.sleep(0.05)
        self.ranks: list[psutil.Process] = sorted(self.launcher.children(), key=lambda rank: rank.environ()["RANK"])
        self._port = int(self.ranks[0].environ()["MASTER_PORT"])
        assert self.listens()

    def said(self) -> str:
        """Returns everything it has printed."""
        return (self._out / "output.txt").read_text()

    def processes(self) -> list[psutil.Process]:
        """Returns the launcher, the ranks and the processes forked from them."""
        return [
            process for process in psutil.process_iter(["cmdline"]) if str(self._out) in (process.info["cmdline"] or ())
        ]

    def listens(self) -> bool:
        """Returns whether the port of the ranks' rendezvous is in use."""
        sockets = psutil.net_connections("tcp")
        return any(socket.status == psutil.CONN_LISTEN and self._port in socket.laddr for socket in sockets)

    def assert_nothing_left(self) -> None:
        """Checks that no process, open port, shared memory or file is left."""
        wait_until(lambda: not self.processes())  # torch's workers look for their rank every 5 seconds
        assert not self.listens()
        owners = [str(self._port), *(str(rank.pid) for rank in self.ranks)]
        shared = [path.name for path in Path("/dev/shm").iterdir()]
        assert [name for name in shared if set(re.split(r"\D+", name)) & set(owners)] == []
        cache = "torchinductor"  # torch keeps its compilation cache
        assert [path for path in self.temporary.iterdir() if not path.name.startswith(cache)] == []


@pytest.fixture
def begin(tmp_path: Path, small_data: list[str]) -> Iterator[Callable[..., Run]]:
    """Starts a training and returns when it has written a checkpoint."""
    started: list[Run] = []

    def begin(*flags: str) -> Run:
        started.append(Run(tmp_path, *small_data, *flags))
        return started[-1]

    yield begin
    for run in started:
        for process in run.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(run.temporary, ignore_errors=True)


@pytest.mark.distributed
def test_a_killed_rank_ends_the_run_which_resumes_exactly(
    begin: Callable[..., Run], small_data: list[str], tmp_path: Path
):
    same = [*RECIPE, *small_data, "--strategy", "deepspeed_stage_3", "--optimizer", "adam"]
    run = begin(*same)
    run.ranks[1].kill()
    assert run.launcher.wait(HANG_SECONDS) == 1
    assert "error: rank 1 ended with signal SIGKILL" in run.said()
    folder = run_folder_of(tmp_path)
    assert f"resume with: {train_command()} --resume {folder}\n" in run.said()
    run.assert_nothing_left()
    same += ["--max_steps", str(read(find_checkpoint(str(folder)))["global_step"] + 10)]
    resumed, whole = tmp_path / "resumed", tmp_path / "whole"
    train_all({resumed: [*same, "--resume", str(folder)], whole: same})
    assert largest_difference(last_weights(resumed), last_weights(whole)) == 0


@pytest.mark.distributed
@of_test_all
def test_a_suspended_rank_ends_the_run(begin: Callable[..., Run]):
    """The other rank waits for the suspended rank in a collective, until the collective times out."""
    run = begin("--timeout", "10")
    run.ranks[1].suspend()
    assert run.launcher.wait(HANG_SECONDS) == 1
    assert "error: another rank has ended, hangs or cannot be reached" in run.said()
    assert run.said().count("\nresume with: ") == 1
    assert "\nrank 1 did not end within 10 s after this error, and had to be killed\n" in run.said()
    run.assert_nothing_left()


@pytest.mark.distributed
@of_test_all
def test_all_processes_end_with_a_killed_launcher(begin: Callable[..., Run]):
    run = begin(*WITH_WORKERS)
    assert len(run.processes()) >= 5  # a launcher, two ranks, two workers
    run.launcher.kill()
    run.launcher.wait(HANG_SECONDS)
    wait_until(lambda: not run.processes() and not run.listens())
    run.assert_nothing_left()


FIGURES = {"confusion_matrix.png", "precision_recall.png", "roc.png"}


@pytest.mark.distributed
def test_two_ranks_write_figures_and_print_once(small_data: list[str], tmp_path: Path):
    """The ranks do not read the recipe again, which comes from a pipe. The environment variable makes DeepSpeed choose
    CUDA, as DeepSpeed does automatically on a machine with a GPU."""
    recipe = "{devices: 2, strategy: deepspeed_stage_2, batch_size: 32, max_steps: 3, accelerator: cpu}"
    flags = [*small_data, "--config", "/dev/stdin", "--out", str(tmp_path), "--test_figures", "true"]
    done = run_program("train.py", *flags, env={"DS_ACCELERATOR": "cuda"}, fresh=True, given=recipe)
    assert_ok(done)
    run = run_folder_of(tmp_path)
    assert {path.name for path in run.glob("*.png")} >= FIGURES
    assert done.stdout.count("run folder") == 1
    may_come = ("Preparing the images", "other programs use")
    first, last = [line for line in done.stderr.splitlines() if line and not line.startswith(may_come)]
    assert first.startswith("starting: model net, strategy deepspeed_stage_2, data synthetic, batch")
    assert last.startswith("Step 3/3 |")
