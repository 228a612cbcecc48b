"""Prints the result of a comparison, and writes it as comparison.json and JUnit XML. Importing this module does not
import torch."""

import math
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import rich.table
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

import stepcheck.report
from cifar_zero.comparison.result import Comparison
from cifar_zero.core.atomic import write_json
from cifar_zero.core.console import curves

SCHEMA = 4  # version of comparison.json; keys may be added within a version, but existing keys keep their meaning

MISSING = "-"  # text for an unknown number


def number(value: float) -> str:
    """Returns a number with at least three significant digits and thousands separators: 0.0123, 1.23, 4,329."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def in_percent(share: float) -> str:
    """Returns a share from 0 to 1 in percent, without the percent sign."""
    return f"{100 * share:.2f}"


def size(count: float) -> str:
    return decimal(round(count), precision=2)


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "images/s": ("perf/images_per_second", number),
    "step (ms)": ("perf/step_time_ms", number),
    "memory": ("mem/peak_rank_bytes", size),
    "accuracy (%)": ("test/acc", in_percent),
}
"""The titles of the columns after the verdict, each with its key in metrics.json and the function that formats its
values."""


def show(comparison: Comparison, folder: Path) -> None:
    """Prints the settings that differ, the verdicts, the notes, and where the plot and TensorBoard's curves are."""
    console = Console(highlight=False, soft_wrap=True, width=None if Console().is_terminal else 160)
    for setting, values in comparison.differences.items():
        listed = "; ".join(f"{value} ({name})" for name, value in values.items())
        console.print(f"[bold]not the same: {escape(setting)}[/] {escape(listed)}")
    console.print(_table(comparison), soft_wrap=False)
    console.print(f"[bold]{escape(comparison.headline)}[/]", *map(escape, comparison.notes), sep="\n")
    console.print(f"[dim]losses  [/]{escape(str(folder / 'losses.png'))}")
    if any(folder.glob("*/version_*/events.out.tfevents.*")):  # not with --runs
        console.print(f"[dim]curves  [/]{escape(curves(folder))}")


def _table(comparison: Comparison) -> rich.table.Table:
    filled: dict[str, tuple[str, Callable[[float], str]]] = {}
    for title, (key, form) in COLUMNS.items():
        if any(variant.number(key) is not None for variant in comparison.variants):
            filled[title] = key, form
    table = rich.table.Table("variant", "verdict", *filled)
    for variant in comparison.variants:
        style = "green" if variant.passed else "red"
        cells = [escape(variant.name), f"[{style}]{escape(variant.verdict)}[/]"]
        for key, form in filled.values():
            value = variant.number(key)
            cells.append(MISSING if value is None else form(value))
        table.add_row(*cells)
    return table


def write_comparison(comparison: Comparison, file: Path) -> None:
    """Writes comparison.json atomically. NaN and infinity become null."""
    write_json(file, {"schema": SCHEMA, "passed": comparison.passed, **asdict(comparison)})


def write_junit(comparison: Comparison, file: Path) -> None:
    """Writes a JUnit test case for each variant. A variant that has not passed is a failure."""
    cases = []
    for variant in comparison.variants:
        seconds = variant.number("perf/fit_seconds") or 0.0
        command = shlex.split(variant.command)
        case = {"engine": variant.name, "passed": variant.passed, "summary": variant.verdict, "command": command}
        cases.append({**case, "findings": [{"text": variant.verdict}], "training_seconds": seconds})
    stepcheck.report.write_junit(file, {"engines": cases, "command": []})
