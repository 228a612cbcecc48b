"""The runs that are compared: train.py as a user starts it, and the reference loops, on the same images."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.options import Options
from cifar_zero import data
from cifar_zero.config.flags import DataConfig

WARMUP_STEPS = 10
"""Optimizer steps that metrics.json leaves out (`build.WARMUP_STEPS`, which costs an import of torch)."""

NUM_TRAIN = 50_000
"""Training images: CIFAR-10's number."""


@dataclass(frozen=True)
class Bench:
    """Where the runs of a benchmark take place.

    Attributes:
        options: of the benchmark.
        directory: removed with all that is in it when the benchmark ends.
    """

    options: Options
    directory: Path

    @property
    def cache(self) -> Path:
        """Directory of decoded images, shared by all runs."""
        return self.directory / "cache"

    def prepare(self, count: int = NUM_TRAIN) -> None:
        """Makes `count` synthetic training images, before anything is measured."""
        data.prepare(DataConfig(source="synthetic", cache=str(self.cache), synthetic_size=count))

    def ours(self, batch_size: int, steps: int, *flags: str) -> dict[str, float]:
        """A run of train.py for `steps` timed steps, with its logging and its checkpoints; see `train`."""
        metrics = self.train(*length_flags(batch_size, steps), *flags)
        return {
            "images_per_second": metrics["perf/images_per_second"],
            "step_time_ms": metrics["perf/step_time_ms"],
            "seconds_to_first_step": metrics["perf/seconds_to_first_step"],
            "timed_images": (metrics["steps"] - WARMUP_STEPS) * metrics["batch_size"],
        }

    def train(self, *flags: str) -> dict[str, Any]:
        """A run of train.py on the synthetic images, its test cut to a batch; returns its metrics.json."""
        with tempfile.TemporaryDirectory(dir=self.directory) as out:
            processes.run("train.py", *flags, *self.train_flags(out))
            (file,) = Path(out).glob("*/version_*/metrics.json")
            return json.loads(file.read_text())

    def train_flags(self, out: str) -> list[str]:
        """What a measured run of train.py is told beside its recipe."""
        data = ["--data.source", "synthetic", "--data.cache", str(self.cache)]
        return [*data, "--accelerator", self.options.accelerator, "--trainer.limit_test_batches", "1", "--out", out]

    def reference(
        self, loop: str, steps: int, *flags: str, environment: Mapping[str, str] | None = None
    ) -> dict[str, float]:
        """A run of a loop of benchmarks/loops for `steps` timed steps."""
        given = ["--cache", str(self.cache), "--steps", str(steps), "--device", self.options.device]
        finished = processes.run("-m", f"benchmarks.loops.{loop}", *given, *flags, environment=environment)
        return last_json(finished.stdout)


@contextmanager
def bench(options: Options) -> Iterator[Bench]:
    """A scratch directory for a benchmark."""
    with tempfile.TemporaryDirectory(prefix="cifar-zero-bench-") as directory:
        yield Bench(options, Path(directory))


def length_flags(batch_size: int, steps: int) -> list[str]:
    """What train.py is told for its warm-up and `steps` timed steps of `batch_size` images."""
    steps += WARMUP_STEPS
    epochs = math.ceil(steps / (NUM_TRAIN // batch_size))
    return ["--batch_size", str(batch_size), "--epochs", str(epochs), "--max_steps", str(steps)]


def last_json(stdout: str) -> dict[str, Any]:
    """The last line that is a JSON object: libraries print before it and after it.

    Raises RunFailed where there is none.
    """
    for line in reversed(stdout.splitlines()):
        if line.startswith("{") and line.endswith("}"):
            return json.loads(line)
    raise processes.RunFailed("printed no figures")
