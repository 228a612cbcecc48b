"""Trains what a comparison needs, one run after the other, each in a process group of its own; no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich import progress as bars
from rich.console import Console

import launch
import run_folder
import start_time

ROOT = Path(__file__).resolve().parents[1]

POLL_SECONDS = 0.25
"""Between two looks at a run."""

PLAIN_SECONDS = 10.0
"""Between two lines of progress where the output is not a terminal."""

SAVING_SECONDS = 45.0
"""How long a run that is asked to end may take: supervisor.py gives its ranks 30 s to write a checkpoint."""

TAIL_BYTES = 100
"""Of losses.csv, that hold its last line: a step and a float."""

TRAIN = (str(ROOT / "train.py"),)
MOVED = ("-P", "-m", "comparison.rounding")
"""What Python starts a run with: from this repository, whatever modules lie in the user's directory."""


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
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(bar_width=24),
            bars.TextColumn("{task.fields[detail]}", markup=False),
            bars.TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,
        )
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
        command = [sys.executable, *program, *flags, "--out", str(self._folder), "--name", name]
        with log.open("w") as output:
            child = subprocess.Popen(
                command,
                env=_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_prepare,
            )
            try:
                self._watch(child, label, name)
            finally:
                _end(child)
        self._done += 1
        found = self._run_folder(name)
        if child.returncode == 0 and found is not None:
            outcome = Outcome(found)
        else:
            outcome = Outcome(None, _failure(log, child.returncode))
        self._bar.update(self._task, completed=self._done * self._steps)
        self._say(f"{self._count(self._done)} {label}: {outcome.error or 'trained'}")
        return outcome

    def _watch(self, child: subprocess.Popen[bytes], label: str, name: str) -> None:
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
        names = (name, name + run_folder.FALLBACK_SUFFIX)
        return next((found for each in names for found in (self._folder / each).glob("version_*")), None)

    def _count(self, number: int) -> str:
        return f"[{number}/{self._runs}]"

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def steps_done(folder: Path) -> int:
    """Optimizer steps up to the newest point of a run's curves."""
    try:
        with (folder / run_folder.LOSSES).open("rb") as file:
            file.seek(-min(TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
            return int(file.read().splitlines()[-1].split(b",")[0])
    except (OSError, IndexError, ValueError):  # not there yet, or no step in it yet
        return 0


def _environment() -> dict[str, str]:
    """Where this program's modules are found; a run takes the time of its own start, and begins from there."""
    left_out = (start_time.VARIABLE, "SLURM_RESTART_COUNT")  # with which a run would look for its checkpoint
    inherited = {key: value for key, value in os.environ.items() if key not in left_out}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths)}


def _prepare() -> None:
    """In the new process: it ends with this one, and SIGINT ends it even where a shell's background job ignores it."""
    launch.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Asks a run that has not ended to do so, as a terminal's Ctrl-C would: its launcher and all ranks.

    What of its process group is left then is killed, at a second Ctrl-C at once.
    """
    try:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(SAVING_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _failure(log: Path, code: int) -> str:
    """The last line of a run that begins with error:, else its last line, else how it ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return errors[-1] if errors else f"{how}: {lines[-1]}" if lines else how
