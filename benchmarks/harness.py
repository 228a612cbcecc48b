"""Measures a comparison in rounds, and formats the results as Markdown tables."""

import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.runs import ROOT
from cifar_zero.comparison.report import number
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import core_count, cpu_name, git_commit, gpu_count, versions

Figures = Mapping[str, float]  # figures of one run; a table shows the keys that are in UNITS

UNITS = {
    "images_per_second": "images/s",
    "step_time_ms": "ms a step",
    "seconds_to_first_step": "s to the first step",
    "seconds_to_first_batch": "s to the first batch",
}
"""The heading of each figure, in the order of the columns."""


@dataclass(frozen=True)
class Case:
    """One comparison of several contenders."""

    name: str  # what is compared
    measured: Mapping[str, Callable[[], Figures]]  # functions by name; each makes one run in a fresh process
    references: Mapping[str, Callable[[], Figures]]  # functions by name; `measured` is divided by each

    @property
    def contenders(self) -> Mapping[str, Callable[[], Figures]]:
        return {**self.measured, **self.references}


def parse(parser: exits.Parser) -> Namespace:
    """Parses the command line, resolves --accelerator to cpu or gpu, and installs the signal handlers
    (`exits.install`). Raises UsageError if --repeats or --steps is less than 1, or if --accelerator is gpu without a
    GPU."""
    arguments = parser.parse_args()
    for name in ("repeats", "steps"):
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}")
    gpus = gpu_count() if arguments.accelerator != "cpu" else 0
    if arguments.accelerator == "gpu" and not gpus:
        raise UsageError("--accelerator gpu: torch finds no GPU on this machine")
    arguments.accelerator = "gpu" if gpus else "cpu"
    exits.install()
    return arguments


def measure_cases(name: str, cases: Sequence[Case], arguments: Namespace) -> None:
    """Measures every case and prints its table. Progress is printed to the standard error. Raises RunFailed if a run
    fails."""
    print(heading(name, arguments.repeats, arguments.accelerator), flush=True)
    total, done = arguments.repeats * sum(len(case.contenders) for case in cases), 0
    for case in cases:
        runs: dict[str, list[Figures]] = {contender: [] for contender in case.contenders}
        for repeat in range(arguments.repeats):
            # Every other round is in reverse order, so that a machine that warms up or slows down favours no contender.
            for contender in list(case.contenders)[:: -1 if repeat % 2 else 1]:
                done += 1
                print(f"run {done} of {total}: {case.name}: {contender}", file=sys.stderr, flush=True)
                runs[contender].append(case.contenders[contender]())
        print(f"\n{markdown(case.name, rows(runs, list(product(case.measured, case.references))))}")


def machine(accelerator: str) -> str:
    """Returns the names of the CPU and, for the accelerator "gpu", of the GPUs."""
    cores = core_count()
    named = f"{cpu_name()}, {cores} {'core' if cores == 1 else 'cores'}"
    if accelerator == "gpu":
        import torch  # imported here, because other errors are reported without torch

        named += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return named


def heading(name: str, rounds: int, accelerator: str) -> str:
    """Returns three lines: the benchmark and its rounds, the machine and its load, and the versions and the commit."""
    numbers = versions()
    shown = ", ".join(f"{package} {numbers[package]}" for package in ("python", "torch", "lightning", "deepspeed"))
    title = f"{name}; rounds: {rounds}; minimum / median / maximum; ratios are taken within a round"
    load = f"load average {os.getloadavg()[0]:.2f}"
    return f"{title}\n{machine(accelerator)}; {load}\n{shown}; commit {git_commit(ROOT) or 'unknown'}"


def rows(runs: Mapping[str, Sequence[Figures]], ratios: Sequence[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Returns the rows of a comparison's table: texts, keyed by the row's name and then by the column's heading. `runs`
    has the figures of each contender in each round. For each pair of contenders in `ratios`, the images per second of
    the first are divided by those of the second within each round, when the machine was in the same state."""
    table: dict[str, dict[str, str]] = {}
    for name, rounds in runs.items():
        table[name] = {UNITS[key]: summary([one[key] for one in rounds]) for key in UNITS if key in rounds[0]}
    speed = "images_per_second"
    for over, under in ratios:
        values = [one[speed] / other[speed] for one, other in zip(runs[over], runs[under], strict=True)]
        table[f"**{over} / {under}**"] = {UNITS[speed]: summary(values)}
    return table


def markdown(corner: str, table: Mapping[str, Mapping[str, object]]) -> str:
    """Returns a Markdown table of rows by name. `corner` is the heading of the column of names."""
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    lines: list[Sequence[object]] = [[corner, *columns], ["---"] * (len(columns) + 1)]
    for name, row in table.items():
        lines.append([name, *(row.get(column, "") for column in columns)])
    cells = [[str(cell).replace("\n", " ").replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def summary(values: Sequence[float]) -> str:
    return " / ".join(map(number, (min(values), statistics.median(values), max(values))))
