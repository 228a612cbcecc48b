"""What a sweep prints at its end; no torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from sweeping.metric import shown
from sweeping.planned import short
from sweeping.result import Result

LOG_WIDTH = 160
"""Characters of a line where the output is not a terminal."""


def print_summary(results: Sequence[Result], metric: str, best: str, folder: Path) -> None:
    """Prints the settings, those that failed with their line, the best one's command and where the rest lies.

    Args:
        results: ranked.
        metric: that they are ranked by.
        best: the command of the best setting; empty where none finished.
        folder: of the sweep.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=LOG_WIDTH)
    names = list(results[0].setting) if results else []
    figures = [metric, "lowest to highest", "standard deviation", "seeds", "training (s)"]
    table = Table("", *map(escape, names), *[Column(name, justify="right") for name in figures])
    for place, result in enumerate(results, start=1):
        finished = result.state == "finished"
        style = {"failed": "red", "finished": ""}.get(result.state, "dim")
        values = [escape(short(value)) for value in result.setting.values()]
        figured = _figures(result) if finished else [result.state, *[""] * (len(figures) - 1)]
        table.add_row(str(place) if finished else "", *values, *figured, style=style)
    console.print(table)
    for result in (result for result in results if result.state == "failed"):
        setting = ", ".join(f"{name} {value}" for name, value in result.setting.items())
        console.print(f"[red]failed: {escape(setting)}: {escape(result.error)}", soft_wrap=True)
    if best:
        console.print(f"[dim]best    [/]{escape(best)}", soft_wrap=True)
        console.print(f"[dim]figure  [/]{escape(str(folder / 'sweep.png'))}", soft_wrap=True)
    where = escape(shlex.quote(str(folder)))
    console.print(f"[dim]curves  [/]tensorboard --logdir {where} --host localhost", soft_wrap=True)


def _figures(result: Result) -> list[str]:
    values = [run.value for run in result.runs]
    several = len(values) > 1
    seconds = sum(run.seconds for run in result.runs)
    return [
        shown(result.mean),
        f"{shown(min(values))}-{shown(max(values))}" if several else "-",
        "-" if result.deviation is None else shown(result.deviation),
        str(len(values)),
        f"{seconds:,.0f}",
    ]
