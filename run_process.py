"""One run of train.py in a process group of its own: started, asked to end, read while it trains; no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich import progress as bars
from rich.console import Console

import launch
import run_folder
import start_time

ROOT = Path(__file__).resolve().parent

POLL_SECONDS = 0.25
"""Between two looks at a run."""

PLAIN_SECONDS = 10.0
"""Between two lines of progress where the output is not a terminal."""

SAVING_SECONDS = 45.0
"""How long a run that is asked to end may take: supervisor.py gives its ranks 30 s to write a checkpoint."""

TAIL_BYTES = 100
"""Of losses.csv, that hold its last line: a step and a float."""

TRAIN = (str(ROOT / "train.py"),)
"""What Python starts a run with: from this repository, whatever modules lie in the user's directory."""

Run = subprocess.Popen[bytes]


def start(
    program: Sequence[str],
    flags: Sequence[str],
    log: Path,
    told: Mapping[str, str] | None = None,
    cores: Collection[int] = (),
) -> Run:
    """Starts a run, which takes the time of its own start.

    Args:
        program: what Python starts, for instance TRAIN.
        flags: of train.py.
        log: the file that takes what it prints.
        told: further environment variables.
        cores: those that it and its ranks keep to on Linux; none: all of this process.
    """
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, *program, *flags],
            env={**_environment(), **(told or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(_prepare, cores),
        )


def progress_bar(console: Console) -> bars.Progress:
    """A bar for the runs, drawn when it is told to, at a terminal alone; a task has a `detail`."""
    return bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=24),
        bars.TextColumn("{task.fields[detail]}", markup=False),
        bars.TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        disable=not console.is_terminal,
    )


def ask_to_end(run: Run) -> None:
    """As a terminal's Ctrl-C does: its launcher and all ranks save, and end."""
    os.killpg(run.pid, signal.SIGINT)


def end(runs: Sequence[Run]) -> None:
    """Asks runs that have not ended to do so.

    What of their process groups is left then is killed, at a second Ctrl-C at once.
    """
    try:
        going_on = [run for run in runs if run.poll() is None]
        for run in going_on:
            ask_to_end(run)
        over = time.monotonic() + SAVING_SECONDS
        for run in going_on:
            with suppress(subprocess.TimeoutExpired):
                run.wait(max(0.0, over - time.monotonic()))
    finally:
        for run in runs:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def failure(log: Path, code: int) -> str:
    """The last line of a run that begins with error:, else its last line, else how it ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return errors[-1] if errors else f"{how}: {lines[-1]}" if lines else how


def folders(out: Path, name: str) -> list[Path]:
    """The run folders of a name, also where its CIFAR-10 could not be had; the newest last."""
    names = (name, name + run_folder.FALLBACK_SUFFIX)
    found = [folder for each in names for folder in (out / each).glob("version_*")]
    return sorted(found, key=lambda folder: int(folder.name.removeprefix("version_")))


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


def _prepare(cores: Collection[int]) -> None:
    """In the new process: it ends with this one, and SIGINT ends it even where a shell's background job ignores it."""
    launch.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
