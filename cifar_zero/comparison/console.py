"""Prints a comparison; no torch."""

import shlex
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cifar_zero.comparison.result import Comparison
from cifar_zero.comparison.tables import figures, number, percent, size, verdict_line

LOG_WIDTH = 160
"""Characters per line if the output is not a terminal."""

FIGURES = {
    "images/s": ("perf/images_per_second", number),
    "step (ms)": ("perf/step_time_ms", number),
    "memory": ("mem/peak_rank_bytes", size),
    "accuracy (%)": ("test/acc", percent),
}


def show(comparison: Comparison, folder: Path, console: Console | None = None) -> None:
    """Prints the differing settings, the verdicts with their numbers and causes, and where the report is.

    Args:
        comparison: judged.
        folder: of the report.
        console: standard output by default.
    """
    if console is None:
        console = Console(highlight=False, width=None if Console().is_terminal else LOG_WIDTH)
    for difference in comparison.differences:
        console.print(f"[bold]not the same: {escape(difference.setting)}[/] {escape(str(difference))}", soft_wrap=True)
    found = figures(comparison, FIGURES)
    table = Table("variant", "verdict", *found.columns)
    for variant in comparison.variants:
        style = "green" if variant.passed else "red"
        cells = [cell.text for cell in found.rows[variant.name]]
        table.add_row(escape(variant.name), f"[{style}]{escape(verdict_line(variant))}[/]", *cells)
    console.print(table)
    causes = [f"{each.name}: {cause}" for each in comparison.variants if each.verdict for cause in each.verdict.causes]
    for line in (*causes, *comparison.notes):
        console.print(escape(line), soft_wrap=True)
    console.print(f"[dim]report  [/]{escape(str(folder / 'report.html'))}", soft_wrap=True)
    if any(folder.glob("*/version_*/events.out.tfevents.*")):  # not with --runs
        where = escape(shlex.quote(str(folder)))
        console.print(f"[dim]curves  [/]tensorboard --logdir {where} --host localhost", soft_wrap=True)
