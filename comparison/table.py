"""What a comparison prints: what differs, the verdicts with their figures, where the rest lies; no torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from comparison.result import GOOD, Comparison, Run, Spread, Variant

LOG_WIDTH = 160
"""Characters of a line where the output is not a terminal."""


def print_comparison(comparison: Comparison, folder: Path, console: Console | None = None) -> None:
    """Prints all of it.

    Args:
        comparison: of the runs.
        folder: with the report.
        console: where to; the standard output by default.
    """
    console = console or _console()
    for difference in comparison.differences:
        names: dict[str, list[str]] = {}
        for name, value in difference.values.items():
            names.setdefault(value, []).append(name)
        values = "; ".join(f"{value} ({', '.join(having)})" for value, having in names.items())
        console.print(f"[bold]not the same: {escape(difference.setting)}[/] {escape(values)}", soft_wrap=True)
    figures = ("images/s", "step (ms)", "memory (GB)", "accuracy")
    columns = [Column(name, justify="right") for name in ("first step off", *figures)]
    table = Table("variant", "verdict", *columns)
    for variant in comparison.variants:
        style = "green" if variant.verdict is not None and variant.verdict.kind in GOOD else "red"
        first = None if variant.verdict is None else variant.verdict.first_difference
        peak = spread(variant, lambda run: max(run.metrics.get("mem/peak_rank_bytes") or [], default=None))
        table.add_row(
            escape(variant.name),
            f"[{style}]{escape(verdict_line(variant, short=True))}[/]",
            "-" if first is None else str(first),
            _shown(variant.figures.get("perf/images_per_second"), "{:,.0f}"),
            _shown(variant.figures.get("perf/step_time_ms"), "{:,.2f}"),
            _shown(peak, "{:.2f}", 1e-9),
            _shown(variant.figures.get("test/acc"), "{:.2%}"),
        )
    console.print(table)
    for variant in comparison.variants:
        for cause in variant.verdict.causes if variant.verdict is not None else []:
            console.print(f"{escape(variant.name)}: {escape(cause)}", soft_wrap=True)
    for note in comparison.notes:
        console.print(escape(note), soft_wrap=True)
    console.print(f"[dim]report  [/]{escape(str(folder / 'report.html'))}", soft_wrap=True)
    if any(folder.glob("*/version_*/events.out.tfevents.*")):  # not where runs from elsewhere were compared
        where = escape(shlex.quote(str(folder)))
        console.print(f"[dim]curves  [/]tensorboard --logdir {where} --host localhost", soft_wrap=True)


def verdict_line(variant: Variant, short: bool = False) -> str:
    """The verdict with its figures.

    Args:
        variant: of the comparison.
        short: without the first step that is not equal, which has a column.
    """
    verdict = variant.verdict
    if verdict is None:
        return f"no verdict: {variant.unjudged}"
    if verdict.kind == "not trained":
        return f"not trained: {variant.error}"
    if verdict.kind in ("reference", "bit-identical"):
        return verdict.kind
    parts = []
    if verdict.loss_difference is not None and verdict.loss_bound is not None:
        parts.append(f"losses {verdict.loss_difference:.1e} of {verdict.loss_bound:.1e}")
    if verdict.weight_difference is not None and verdict.weight_bound is not None:
        parts.append(f"weights {verdict.weight_difference:.1e} of {verdict.weight_bound:.1e}")
    if not short and verdict.first_difference is not None:
        parts.append(f"from step {verdict.first_difference} on not equal")
    if verdict.first_parting is not None:
        parts.append(f"parts at step {verdict.first_parting}")
    if verdict.remark:
        parts.append(verdict.remark)
    return f"{verdict.kind} ({', '.join(parts)})" if parts else verdict.kind


def spread(variant: Variant, figure: Callable[[Run], float | None]) -> Spread | None:
    """Mean and range of a figure over a variant's runs; None where no run has it."""
    values = [value for run in variant.runs if (value := figure(run)) is not None]
    return Spread(sum(values) / len(values), min(values), max(values)) if values else None


def _console() -> Console:
    """As wide as the terminal; in a log file as wide as the table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=LOG_WIDTH)


def _shown(figure: Spread | None, form: str, scale: float = 1.0) -> str:
    if figure is None:
        return "-"
    mean = form.format(figure.mean * scale)
    if figure.lowest == figure.highest:
        return mean
    return f"{mean} ({form.format(figure.lowest * scale)}-{form.format(figure.highest * scale)})"
