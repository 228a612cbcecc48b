"""Starts the programs as a user does, and reads the files that their runs wrote."""

import atexit
import csv
import functools
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cifar_zero.__main__ import COMMANDS
from cifar_zero.checkpoints.read import read
from cifar_zero.checkpoints.weights import load_weights, net_weights
from cifar_zero.config import command_line
from cifar_zero.config.placement import OffloadConfig, ZeROConfig
from cifar_zero.core.console import next_to_python
from cifar_zero.core.errors import UsageError
from tests.support.many_runs import train_run
from tests.support.suite import HANG_SECONDS, ROOT, WHOLE, environment, needs_gpu, of_test_all, run_python  # noqa: F401

WARM = ("train.py", "-c", "train", "evaluate", "export", "predict", "compare", "plan")
"""Programs whose imports take five seconds. Programs that import little are started as usual."""


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium or Chrome here")


def shown_by_browser(url: str, folder: Path) -> str:
    """Returns the document that a browser makes of a page. The folder is for the browser's own files."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom"]
    command = [str(BROWSER), *options, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True).stdout


def train_command(*arguments: object) -> str:
    """Returns the command that `python train.py`, started in the repository, prints for the user to run."""
    return shlex.join([next_to_python(Path(sys.executable).name), "train.py", *map(str, arguments)])


def run_program(
    *command: str,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    fresh: bool = False,
    given: str = "",
) -> subprocess.CompletedProcess[str]:
    """Runs `python <command>`, or a command of cifar-zero. Returns its output and exit code. A program that is started
    afresh reads `given` from its standard input.

    Programs of `WARM` run in a fork of tests.support.warm_start, which has their imports, unless `fresh` is true. It
    has one fork at a time.
    """
    env = dict(env or {})
    if cwd != ROOT:
        env.setdefault("PYTHONPATH", str(ROOT))
    if command[0] in WARM and not fresh:
        return _warm_start().run(command, cwd, environment(env))
    started = ["-m", "cifar_zero", *command] if command[0] in COMMANDS else command
    return run_python(*started, cwd=cwd, env=env, given=given)


class WarmStart:
    """A process of tests.support.warm_start, which all tests of this pytest process share."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warm-start-"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_start", str(self.folder / "socket")],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
        )
        atexit.register(self.end)
        while not (self.folder / "socket").exists():
            assert self.process.poll() is None, "tests.support.warm_start ended"
            time.sleep(0.02)

    def run(self, command: tuple[str, ...], cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Runs a program and returns its output and exit code."""
        with (
            socket.socket(socket.AF_UNIX) as connection,
            tempfile.TemporaryFile("w+") as output,
            tempfile.TemporaryFile("w+") as errors,
        ):
            connection.connect(str(self.folder / "socket"))
            request = json.dumps([command, str(cwd), environment]).encode()
            socket.send_fds(connection, [request], [output.fileno(), errors.fileno()])
            with connection.makefile() as answers:
                process = int(answers.readline())
                connection.settimeout(HANG_SECONDS)
                try:
                    code = int(answers.readline())
                except TimeoutError as error:
                    os.killpg(process, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(command, HANG_SECONDS) from error
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command, code, output.read(), errors.read())

    def end(self) -> None:
        """Ends the process, after all programs have ended."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def _warm_start() -> WarmStart:
    return WarmStart()


class Ranks:
    """Ranks that call one function after the other. All tests of this pytest process share them."""

    def __init__(self, ranks: int):
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.numbers = itertools.count()
        with (self.folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.many_runs", str(self.folder), str(ranks)],
                cwd=ROOT,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        atexit.register(self.end)

    def call(self, function: str, *arguments: object) -> str:
        """Calls `module:function` on each rank and returns what they printed. If it fails, raises AssertionError with
        the end of the output."""
        printed = len((self.folder / "output").read_text())
        request = self.folder / f"{next(self.numbers)}.json"
        request.with_suffix(".part").write_text(json.dumps([function, *arguments]))
        request.with_suffix(".part").rename(request)
        over = time.monotonic() + HANG_SECONDS
        while not request.with_suffix(".done").exists():
            if self.process.poll() is not None or time.monotonic() > over:
                output = (self.folder / "output").read_text()
                self.end()
                raise AssertionError(output[-6000:])
            time.sleep(0.02)
        return (self.folder / "output").read_text()[printed:]

    def end(self) -> None:
        """Ends the launcher, which ends its ranks."""
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_RANKS: dict[int, Ranks] = {}


def on_ranks(ranks: int, function: Callable[..., None], *arguments: object) -> str:
    """Calls a function on each of `ranks` ranks and returns what they printed. The ranks are started at the first call
    and used again. The function must be an attribute of its module, and JSON must be able to represent its
    arguments."""
    if ranks not in _RANKS or _RANKS[ranks].process.poll() is not None:
        _RANKS[ranks] = Ranks(ranks)
    return _RANKS[ranks].call(_name(function), *arguments)


def _name(function: Callable[..., None]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def train_all(runs: Mapping[Path, list[str]], change: Callable[[pytest.MonkeyPatch], None] | None = None) -> str:
    """Trains several runs and returns what they printed. The figures of the test set are left out, because they take
    longer than a short run.

    Args:
        runs: The flags of each run, by its output directory.
        change: A function that changes the program in the ranks during these runs.
    """
    said = ""
    for out, flags in runs.items():
        devices = command_line.parse(flags).placement.devices
        ranks = 1 if devices == "auto" else devices
        command = [*flags, "--devices", str(ranks), "--out", str(out), "--test_figures", "false"]
        said += on_ranks(ranks, train_run, command, _name(change) if change else "")
    return said


def wait_until(happens: Callable[[], object]) -> None:
    """Waits for an event, and fails if it does not come."""
    over = time.monotonic() + HANG_SECONDS
    while not happens():
        assert time.monotonic() < over, "what the test waits for has not come"
        time.sleep(0.02)


def has_ended(process: int) -> bool:
    """Returns whether a process has ended, even if its parent has not read its exit code."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Yields a disk of `size` bytes (200k, 2m), which is mounted within the block. Skips the test where mounting is not
    permitted."""
    disk = folder / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]).returncode:
        pytest.skip("mounting a small disk needs root, and a machine that lets root do it")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def on_a_small_cpu(recipe: Path) -> list[str]:
    """Returns flags with which a recipe for one large GPU trains on a small CPU, under any strategy. For other recipes
    it returns none."""
    if recipe.stem == "zero_3":
        return ["--zero.param_persistence_threshold", str(ZeROConfig().param_persistence_threshold)]
    if not recipe.stem.endswith("offload_vit"):
        return []
    small = ["--model", "vit_tiny", "--strategy", "baseline", "--bench_steps", "0", "--batch_size", "16"]
    switches = ["--zero.sub_group_size", str(ZeROConfig().sub_group_size), "--offload.pin_memory", "false"]
    return [*small, *switches, "--offload.cpuadam_cores_perc", str(OffloadConfig().cpuadam_cores_perc)]


@contextmanager
def refused(*texts: str) -> Iterator[None]:
    """Checks that the block raises a UsageError of one line that contains the texts."""
    with pytest.raises(UsageError) as error:
        yield
    line = str(error.value)
    assert "\n" not in line
    assert all(text in line for text in texts), line


def assert_ok(done: subprocess.CompletedProcess[str]) -> None:
    """Checks that a program succeeded, and shows the end of its output if it did not."""
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def run_folder_of(out: Path) -> Path:
    """Returns the only run folder under an output directory, or `out` itself if it is a run folder. The functions below
    also take both kinds of folders."""
    if (out / "config.yaml").exists():
        return out
    (folder,) = out.glob("*/version_*")
    return folder


def metrics_of(out: Path) -> dict[str, Any]:
    """Returns a run's metrics.json."""
    return json.loads((run_folder_of(out) / "metrics.json").read_text())


def last_checkpoint(out: Path) -> dict[str, Any]:
    """Returns the content of a run's last checkpoint, whatever strategy wrote it."""
    return read(run_folder_of(out) / "checkpoints" / "last.ckpt")


def last_weights(out: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of the last checkpoint by the model's own names. They are the average if the checkpoint has
    one."""
    return net_weights(last_checkpoint(out))


def read_weights(net: torch.nn.Module, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns the weights in a checkpoint, which must fit a model."""
    weights = net_weights(read(checkpoint))
    load_weights(net, weights, str(checkpoint))
    return weights


def curve(out: Path, tag: str) -> dict[int, float]:
    """Returns the values of a curve by optimizer step, as a run logged it for TensorBoard."""
    events = EventAccumulator(str(run_folder_of(out)), size_guidance={"scalars": 0})
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def losses(out: Path) -> dict[int, float]:
    """Returns the training loss of each optimizer step, from a run's losses.csv."""
    with (run_folder_of(out) / "losses.csv").open() as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Returns the largest absolute difference between elements of two state dictionaries with the same names."""
    assert one.keys() == other.keys()
    return max((one[key] - other[key]).abs().max().item() for key in one)
