"""Starts the measured runs, each in a fresh process. A run is train.py, started as a user starts it, or a reference
loop."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cifar_zero.core import exits
from cifar_zero.core.errors import RunError

ROOT = Path(__file__).resolve().parent.parent

TIMEOUT_SECONDS = 1800.0
"""Time limit of one run. DeepSpeed compiles its operators when it first needs them, which takes 4 minutes on two busy
cores."""

FIGURES = ("images_per_second", "step_time_ms", "seconds_to_first_step")
"""The metrics of metrics.json that a benchmark uses. Their names in that file begin with perf/."""

PREPARE = """
import sys
from cifar_zero import data
from cifar_zero.config.settings import DataConfig
data.prepare(DataConfig(source="synthetic", cache=sys.argv[1]))
"""
"""Program that decodes the synthetic images into the folder that is its argument. It runs with the code that is
measured, which may lay out decoded images differently from this code."""

TAIL_LINES = 30  # number of lines that are shown of a failed run's output

NOT_INHERITED = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"),
)
"""Environment variables of this shell that would change a run's ranks or threads."""


class RunFailed(RunError):
    """Raised if a measured run fails. The message names the failure and includes the end of the run's output."""


@dataclass(frozen=True)
class Bench:
    """The device and the scratch directory of a benchmark's runs."""

    accelerator: str  # cpu or gpu
    directory: Path
    root: Path = ROOT  # of the code that is measured

    @property
    def cache(self) -> Path:
        """The directory of decoded images that all runs share."""
        return self.directory / "cache"

    def train_py(self, steps: int, *flags: str) -> dict[str, float]:
        """Runs train.py for `steps` timed steps on synthetic images, on one device unless the flags name more. Returns
        FIGURES."""
        data = ["--data.source", "synthetic", "--data.cache", str(self.cache), "--accelerator", self.accelerator]
        with tempfile.TemporaryDirectory(dir=self.directory) as out:
            arguments = ("--devices", "1", *flags, *data, "--bench_steps", str(steps), "--out", out)
            run("train.py", *arguments, root=self.root)
            (file,) = Path(out).glob("*/version_*/metrics.json")
            metrics = json.loads(file.read_text())
        return {figure: metrics[f"perf/{figure}"] for figure in FIGURES}

    def reference(self, loop: str, steps: int, *flags: str, extra_env: Mapping[str, str] | None = None) -> Any:
        """Runs a loop of benchmarks/loops for `steps` timed steps and returns the figures that it prints."""
        device = "cuda" if self.accelerator == "gpu" else "cpu"
        arguments = ["--cache", str(self.cache), "--steps", str(steps), "--device", device]
        return last_json(run("-m", f"benchmarks.loops.{loop}", *arguments, *flags, extra_env=extra_env))


@contextmanager
def bench(accelerator: str, root: Path = ROOT) -> Iterator[Bench]:
    """Makes a benchmark's scratch directory with the synthetic images, and removes it afterwards."""
    with tempfile.TemporaryDirectory(prefix="cifar-zero-bench-") as directory:
        made = Bench(accelerator, Path(directory), root)
        run("-c", PREPARE, str(made.cache), root=root)
        yield made


def run(
    *arguments: str,
    extra_env: Mapping[str, str] | None = None,
    seconds: float = TIMEOUT_SECONDS,
    root: Path = ROOT,
) -> str:
    """Runs `python <arguments>` in `root`, a checkout of the repository, and returns what it wrote to standard output
    and error. `extra_env` is added to the environment. Raises RunFailed if the exit code is not 0, or after `seconds`,
    when the run and its child processes are killed."""
    inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=root,
        env={**inherited, exits.STARTED: str(time.time()), **(extra_env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a separate process group, so that its ranks can be ended with it
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        ended = f"ended with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        ended = f"did not end within {seconds:.0f} s"
    finally:
        if process.poll() is None:  # after Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        tail = "\n".join([line for line in output.splitlines() if line.strip()][-TAIL_LINES:])
        raise RunFailed(f"{ended}; its last lines:\n{tail}")
    return output


def last_json(output: str) -> Any:
    """Returns the last line that is a JSON object, parsed. Other lines come from libraries. Raises RunFailed if there
    is none."""
    for line in reversed(output.splitlines()):
        if line.startswith("{") and line.endswith("}"):
            return json.loads(line)
    raise RunFailed("printed no line of JSON with its figures")
