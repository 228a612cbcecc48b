"""Trains what a comparison needs, one run after the other, each in a process group of its own; no torch."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console

import run_process
from run_process import PLAIN_SECONDS, POLL_SECONDS, Run, steps_done

MOVED = ("-P", "-m", "comparison.rounding")
"""What Python starts the second run of the reference with, as run_process.TRAIN any other."""


@dataclass
class Outcome:
    """What became of a run."""

    folder: Path | None
    """Of the finished run."""
    error: str = ""
    """The line with which it failed."""


class Runner:
    """Starts runs, shows how far they are, and leaves no process behind.

    Args:
        folder: of the comparison: the run folders and the output of each run go there.
        runs: how many will be made.
        steps: optimizer steps of each, as far as that is known.
        batch_size: images of a step.
    """

    def __init__(self, folder: Path, runs: int, steps: int, batch_size: int):
        self._folder = folder
        self._runs, self._steps, self._batch_size = runs, steps, batch_size
        self._done = 0
        self._console = Console(stderr=True, highlight=False)
        self._bar = run_process.progress_bar(self._console)
        self._started = time.monotonic()
        self._task = self._bar.add_task("", total=runs * steps, detail="")

    def add(self, runs: int) -> None:
        """So many more than were said before."""
        self._runs += runs
        self._bar.update(self._task, total=self._runs * self._steps)

    def run(self, label: str, name: str, program: tuple[str, ...], flags: list[str]) -> Outcome:
        """Makes one run and waits for its end.

        Args:
            label: what it is called in the progress.
            name: of the run.
            program: TRAIN or MOVED.
            flags: of train.py.

        Raises:
            KeyboardInterrupt, Stopped: after the run has been ended.
        """
        log = self._folder / f"{name}.log"
        child = run_process.start(program, [*flags, "--out", str(self._folder), "--name", name], log)
        try:
            self._watch(child, label, name)
        finally:
            run_process.end([child])
        self._done += 1
        found = self._run_folder(name)
        if child.returncode == 0 and found is not None:
            outcome = Outcome(found)
        else:
            outcome = Outcome(None, run_process.failure(log, child.returncode))
        self._bar.update(self._task, completed=self._done * self._steps)
        self._say(f"{self._count(self._done)} {label}: {outcome.error or 'trained'}")
        return outcome

    def _watch(self, child: Run, label: str, name: str) -> None:
        """Shows how far a run is until it has ended; its losses.csv grows at each point of its curves."""
        next_line = time.monotonic() + PLAIN_SECONDS
        description, last, speed = f"{self._count(self._done + 1)} {label}", (0, 0.0), ""
        with self._bar if self._console.is_terminal else nullcontext():
            while child.poll() is None:
                time.sleep(POLL_SECONDS)
                folder, now = self._run_folder(name), time.monotonic()
                steps = steps_done(folder) if folder else 0
                if steps > last[0]:
                    speed = f", {(steps - last[0]) * self._batch_size / (now - last[1]):,.0f} images/s" * bool(last[0])
                    last = steps, now
                completed = self._done * self._steps + min(steps, self._steps)
                detail = f"{steps:,} of {self._steps:,} steps{speed}{self._left(completed)}"
                self._bar.update(self._task, description=description, completed=completed, detail=detail)
                if self._console.is_terminal:
                    self._bar.refresh()
                elif now >= next_line:
                    next_line = now + PLAIN_SECONDS
                    self._say(f"{description}: {detail}")

    def _left(self, completed: int) -> str:
        """By what the steps so far took, with the start and the test of each run."""
        if not completed:
            return ""
        seconds = (time.monotonic() - self._started) / completed * (self._runs * self._steps - completed)
        return f", {timedelta(seconds=int(seconds))} left"

    def _run_folder(self, name: str) -> Path | None:
        return next(iter(run_process.folders(self._folder, name)), None)

    def _count(self, number: int) -> str:
        return f"[{number}/{self._runs}]"

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)
