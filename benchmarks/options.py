"""The options that all benchmarks have."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import NoReturn

from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count

MIN_STEPS = 10
"""Fewer timed steps than its warm-up has, train.py would shorten the warm-up for."""

DEFAULT_REPEATS, SHORT_REPEATS = 5, 1


@dataclass(frozen=True)
class Options:
    """What was asked for, with what was left open settled.

    Attributes:
        repeats: rounds, in each of which every contender runs once.
        steps: timed steps of a run; None: the benchmark's own number.
        short: whether the benchmark's own numbers are the small ones.
        accelerator: cpu or gpu, the same for all contenders.
    """

    repeats: int
    steps: int | None
    short: bool
    accelerator: str

    @property
    def device(self) -> str:
        """torch's name for the accelerator."""
        return "cuda" if self.accelerator == "gpu" else "cpu"


class Parser(argparse.ArgumentParser):
    """argparse with one line for wrong usage."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(f"{message}; see --help")


def parser(name: str, description: str | None, steps: bool = True) -> Parser:
    """A parser with the common options.

    Args:
        name: of the benchmark's module.
        description: for the help.
        steps: whether the benchmark has timed steps.
    """
    made = Parser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--repeats", type=int, help=f"rounds of runs (default: {DEFAULT_REPEATS}, with --short {SHORT_REPEATS})"
    )
    if steps:
        made.add_argument("--steps", type=int, help=f"timed optimizer steps of a run, at least {MIN_STEPS}")
    made.add_argument("--short", action="store_true", help="one round of short runs: a first look")
    made.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="auto: the GPU if any")
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return made


def settle(namespace: argparse.Namespace) -> Options:
    """The common options of a parsed command line.

    Raises UsageError for what makes no sense or is not there.
    """
    repeats = namespace.repeats
    if repeats is None:
        repeats = SHORT_REPEATS if namespace.short else DEFAULT_REPEATS
    if repeats < 1:
        raise UsageError(f"--repeats must be at least 1, not {repeats}")
    steps = getattr(namespace, "steps", None)
    if steps is not None and steps < MIN_STEPS:
        raise UsageError(f"--steps must be at least {MIN_STEPS}, not {steps}")
    gpus = gpu_count() if namespace.accelerator != "cpu" else 0
    if namespace.accelerator == "gpu" and not gpus:
        raise UsageError("--accelerator gpu: no GPU here that torch can use")
    return Options(repeats, steps, namespace.short, "gpu" if gpus else "cpu")
