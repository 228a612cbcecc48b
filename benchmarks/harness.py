"""The rounds in which a comparison is measured, and the tables that show it."""

import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.runs import ROOT, RunFailed
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import core_count, cpu_name, gpu_count
from cifar_zero.reports.summary import git_commit, versions

WIDTH = 120  # characters of a line where the output is not a terminal

Figures = Mapping[str, float]  # what one run measured; keys are those of UNITS, and others that no table shows

UNITS = {
    "images_per_second": "images/s",
    "step_time_ms": "ms a step",
    "seconds_to_first_step": "s to the first step",
    "seconds_to_first_batch": "s to the first batch",
    "seconds": "s",
    "own_mb": "MB of its own",
    "mapped_mb": "MB of files",
}
"""The heading of each figure, in the order of the columns."""


@dataclass(frozen=True)
class Case:
    """A comparison."""

    name: str  # what is compared
    contenders: Mapping[str, Callable[[], Figures]]  # by name, a function that makes one run in a fresh process
    ratios: Sequence[tuple[str, str]] = ()  # pairs of contenders, the first divided by the second
    ratio_of: str = "images_per_second"  # the figure that is divided


def parse(parser: exits.Parser) -> Namespace:
    """Parses the command line and resolves --accelerator to cpu or gpu. Raises UsageError: a value makes no sense, or
    there is no GPU."""
    given = parser.parse_args()
    for name in ("repeats", "steps"):
        value = getattr(given, name, None)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}")
    gpus = gpu_count() if given.accelerator != "cpu" else 0
    if given.accelerator == "gpu" and not gpus:
        raise UsageError("--accelerator gpu: torch finds no GPU on this machine")
    given.accelerator = "gpu" if gpus else "cpu"
    exits.install()
    return given


def compare(name: str, cases: Sequence[Case], given: Namespace) -> int:
    """Measures every case and prints its table; progress goes to the standard error. Returns the exit code: 1 if a run
    failed."""
    progress = Console(stderr=True, highlight=False)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(heading(name, given.repeats, given.accelerator), markup=False, soft_wrap=True)
    total, done, failures = given.repeats * sum(len(case.contenders) for case in cases), 0, 0
    for case in cases:
        runs: dict[str, list[Figures | None]] = {contender: [] for contender in case.contenders}
        failed: dict[str, RunFailed] = {}
        for repeat in range(given.repeats):
            # Every other round is in reverse order, so that a machine that warms up or slows down favours no contender.
            for contender in list(case.contenders)[:: -1 if repeat % 2 else 1]:
                done += 1
                progress.print(f"run {done} of {total}: {case.name}: {contender}", markup=False, soft_wrap=True)
                try:
                    runs[contender].append(case.contenders[contender]())
                except RunFailed as failure:
                    runs[contender].append(None)
                    failed[contender] = failure
        console.print(f"\n[bold]{escape(case.name)}[/]")
        console.print(table(runs, case.ratios, case.ratio_of))
        for contender, failure in failed.items():
            console.print(f"failed: {contender} {failure}", markup=False, soft_wrap=True)
        failures += len(failed)
    return 1 if failures else 0


def heading(name: str, rounds: int, accelerator: str) -> str:
    """Returns three lines that name the benchmark, the machine, the versions and the commit."""
    cores = core_count()
    machine = f"{cpu_name()}, {cores} core{'s'[: cores > 1]}"
    if accelerator == "gpu":
        import torch

        machine += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    found = versions()
    shown = ", ".join(f"{package} {found[package]}" for package in ("python", "torch", "lightning", "deepspeed"))
    title = f"{name}; minimum / median / maximum of {rounds} round{'s'[: rounds > 1]}; ratios are taken within a round"
    load = f"load average {os.getloadavg()[0]:.2f}"
    return f"{title}\n{machine}; {load}\n{shown}; commit {git_commit(ROOT) or 'unknown'}"


def table(runs: Mapping[str, Sequence[Figures | None]], ratios: Sequence[tuple[str, str]], ratio_of: str) -> Table:
    """Returns the table of a comparison: `runs` are the figures of each round, None where the run failed; see `Case`
    for the others."""
    found = {figure for rounds in runs.values() for one in rounds if one for figure in one}
    shown = [figure for figure in UNITS if figure in found]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("", no_wrap=True)
    for figure in shown:
        made.add_column(UNITS[figure], justify="right", no_wrap=True)
    for name, rounds in runs.items():
        known = [one for one in rounds if one is not None]
        failed = len(rounds) - len(known)
        label = name if not failed else f"{name}: {failed} of {len(rounds)} failed"
        made.add_row(escape(label), *(spread([one[key] for one in known if key in one]) for key in shown))
    for over, under in ratios:
        cell = spread(paired_ratios(runs[over], runs[under], ratio_of))
        made.add_row(escape(f"{over} / {under}"), *(cell if key == ratio_of else "" for key in shown), style="bold")
    return made


def paired_ratios(over: Sequence[Figures | None], under: Sequence[Figures | None], figure: str) -> list[float]:
    """Returns the ratio of each round in which both ran: within a round, the machine was in the same state for both."""
    pairs = zip(over, under, strict=True)
    return [first[figure] / second[figure] for first, second in pairs if first is not None and second is not None]


def spread(values: Sequence[float]) -> str:
    """Returns "minimum / median / maximum", or "-" for no values."""
    return " / ".join(map(number, (min(values), statistics.median(values), max(values)))) if values else "-"


def number(value: float) -> str:
    """Formats a figure with three digits or more: 0.812, 2.61, 34.2, 3,329."""
    return f"{value:,.{2 if 1 <= value < 10 else 1 if 10 <= value < 100 else 3 if value < 1 else 0}f}"
