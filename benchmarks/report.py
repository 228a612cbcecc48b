"""What a benchmark prints: the machine, the versions, and a table of each comparison."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from benchmarks.runs import ROOT
from cifar_zero.core.hardware import core_count, cpu_name
from cifar_zero.reports.summary import git_commit, versions

Figures = Mapping[str, float]  # what one run measured; keys are those of UNITS, and others that no table shows

UNITS = {
    "images_per_second": "images/s",
    "step_time_ms": "ms a step",
    "seconds_to_first_step": "s to the first step",
    "seconds_to_first_batch": "s to the first batch",
    "seconds": "s",
}
"""The heading of each figure, in the order of the columns."""


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
    """Returns the table of a comparison.

    Args:
        runs: by contender, the figures of each round; None where the run failed.
        ratios: pairs of contenders, the first divided by the second.
        ratio_of: the figure that is divided.
    """
    found = {figure for rounds in runs.values() for one in rounds if one for figure in one}
    shown = [figure for figure in UNITS if figure in found]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("", no_wrap=True)
    for figure in shown:
        made.add_column(UNITS[figure], justify="right", no_wrap=True)
    for name, rounds in runs.items():
        failed = sum(one is None for one in rounds)
        label = name if not failed else f"{name}: {failed} of {len(rounds)} failed"
        known = [one for one in rounds if one is not None]
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
    if not values:
        return "-"
    return " / ".join(map(number, (min(values), statistics.median(values), max(values))))


def number(value: float) -> str:
    """Formats a figure with three digits or more: 0.812, 2.61, 34.2, 3,329."""
    return f"{value:,.{2 if 1 <= value < 10 else 1 if 10 <= value < 100 else 3 if value < 1 else 0}f}"
