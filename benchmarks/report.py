"""What a benchmark prints: the machine, the versions, and a table of every comparison."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.case import Case
from benchmarks.options import Options
from benchmarks.others import Others
from benchmarks.processes import ROOT
from benchmarks.spread import Spread
from cifar_zero.core.hardware import core_count, cpu_name
from cifar_zero.reports.summary import git_commit, versions

UNITS = {
    "images_per_second": "images/s",
    "step_time_ms": "ms a step",
    "seconds_to_first_step": "s to the first step",
    "seconds_to_first_batch": "s to the first batch",
    "seconds": "s",
    "copies": "copies in memory",
}
"""The figures of a run in the order of their columns, each with its heading."""

WIDTH = 120
"""Characters of a line where the output is not a terminal."""


def show(title: str, cases: Sequence[Case], options: Options, others: Others) -> None:
    """Prints to the standard output what was measured, and the end of what a failed run said."""
    console = heading(f"{title}; ratios are taken round by round", options, others)
    for case in cases:
        timed = "" if case.timed_images is None else f" ({case.timed_images:,} timed images in each run)"
        console.print(f"\n[bold]{escape(case.name)}[/]{timed}")
        console.print(_table(case))
        for name, failure in case.failures.items():
            console.print(f"failed: {name} {failure}", markup=False, soft_wrap=True)


def heading(title: str, options: Options, others: Others) -> Console:
    """Prints what the tables hold and where they were measured; returns the console that they go to.

    Args:
        title: of the benchmark.
        options: of the benchmark.
        others: counting since before the first run.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    rounds = "1 round" if options.repeats == 1 else f"{options.repeats} rounds"
    console.print(f"{title}; minimum / median / maximum of {rounds}", markup=False, soft_wrap=True)
    for line in machine(options):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"other programs took {others.share():.0%} of the cores meanwhile", markup=False)
    return console


def machine(options: Options) -> list[str]:
    """Lines on the processor, the GPU where it is used, the versions and the commit."""
    cores = core_count()
    where = f"{cpu_name()}, {cores} core{'s'[: cores > 1]}"
    if options.accelerator == "gpu":
        import torch

        where += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    packages = {"python": "", **versions()}
    shown = ", ".join(f"{name} {packages[name]}" for name in ("python", "torch", "lightning", "deepspeed"))
    return [where, f"{shown}; commit {git_commit(ROOT) or 'unknown'}"]


def _table(case: Case) -> Table:
    found = {figure for runs in case.figures.values() for one in runs if one for figure in one}
    shown = [figure for figure in UNITS if figure in found]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for figure in shown:
        table.add_column(UNITS[figure], justify="right", no_wrap=True)
    for name, runs in case.figures.items():
        failed = sum(one is None for one in runs)
        label = name if not failed else f"{name}: {failed} of {len(runs)} failed"
        table.add_row(escape(label), *(_cell(case.values(name, figure)) for figure in shown))
    for ratio in case.ratios:
        cells = [_cell(case.ratio(ratio, figure)) if figure in ratio.figures else "" for figure in shown]
        table.add_row(escape(f"{ratio.over} / {ratio.under}"), *cells, style="bold")
    return table


def _cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return str(Spread.of(known)) if known else "-"
