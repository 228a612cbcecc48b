"""How far a sweep is: a bar at a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console

from run_process import PLAIN_SECONDS, progress_bar


class Progress:
    """Counts runs; use it as a context.

    Args:
        runs: that will be made at most.
    """

    def __init__(self, runs: int):
        self._runs, self._done = runs, 0
        self._console = Console(stderr=True, highlight=False)
        self._bar = progress_bar(self._console)
        self._task = self._bar.add_task("", total=runs, detail="")
        self._started = time.monotonic()
        self._next_line = self._started + PLAIN_SECONDS

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def ended(self, label: str, what: str) -> None:
        """Says what became of a run."""
        self._done += 1
        self._say(f"[{self._done}/{self._runs}] {label}: {what}")

    def show(self, going: Sequence[tuple[str, int, int]]) -> None:
        """Shows the runs that train: their labels, the steps that they have done, and all of their steps."""
        share = self._done + sum(min(1.0, done / max(1, steps)) for _, done, steps in going)
        parts = [f"{label} ({done:,} of {steps:,} steps)" for label, done, steps in going]
        now = time.monotonic()
        left = f"{timedelta(seconds=int((now - self._started) / share * (self._runs - share)))} left" if share else ""
        count = f"[{self._done}/{self._runs}]"
        if self._console.is_terminal:
            detail = ", ".join(filter(None, [f"{len(going)} at work", left]))
            self._bar.update(self._task, description=count, completed=share, detail=detail)
            self._bar.refresh()
        elif now >= self._next_line:
            self._next_line = now + PLAIN_SECONDS
            self._say(f"{count} " + ", ".join(filter(None, [*parts, left])))

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)
