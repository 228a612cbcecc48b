"""What the sources tell the user, on the standard error: single lines, and the progress of long work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

PLAIN_INTERVAL_S = 10.0
"""Seconds between two lines of progress where the output is not a terminal (a log file, a cluster's job output)."""

_console = Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """Print one line, as it is: no markup, and no wrapping that would cut a path in two."""
    _console.print(message, markup=False, soft_wrap=True)


@contextmanager
def progress(
    label: str, total: int | None, unit: Literal["bytes", "images"], done: int = 0
) -> Iterator[Callable[[int], None]]:
    """Show how far a piece of work has come: a bar with the time left on a terminal, else a line now and then.

    `total` is None where it is not known; `done` was there before the work began. Yields a function to be called with
    the number of units that have just been finished.
    """
    if not _console.is_terminal:
        yield _plain_progress(label, total, unit, done)
        return
    units: list[ProgressColumn] = (
        [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    )
    columns = [TextColumn("{task.description}"), BarColumn(), *units, TimeRemainingColumn()]
    with Progress(*columns, console=_console) as bar:
        task = bar.add_task(label, total=total, completed=done)
        yield lambda count: bar.advance(task, count)


def _plain_progress(label: str, total: int | None, unit: str, done: int) -> Callable[[int], None]:
    last = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last >= PLAIN_INTERVAL_S:
            last = time.monotonic()
            say(f"{label}: {done:,} {unit}" if total is None else f"{label}: {done:,} of {total:,} {unit}")

    return advance
