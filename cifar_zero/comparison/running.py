"""Trains the runs of a comparison one after the other, each in its own process group; no torch."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cifar_zero.core.errors import RunError
from cifar_zero.training import run_process


class Runner:
    """Starts runs, prints the progress, and leaves no process behind.

    Args:
        folder: of the comparison; receives the run folders and the log of each run.
        runs: total number of runs.
    """

    def __init__(self, folder: Path, runs: int):
        self.runs = runs
        self._folder = folder
        self._started = 0
        self._console = Console(stderr=True, highlight=False)

    def run(self, name: str, program: Sequence[str], flags: Sequence[str]) -> Path:
        """Trains one run and returns its folder.

        Args:
            name: of the run, its folder and its curves.
            program: script to start, with its first arguments.
            flags: flags of train.py.

        Raises:
            RunError: the run failed; the message is its last error line.
            KeyboardInterrupt, Stopped: raised after the run has been ended.
        """
        self._started += 1
        log = self._folder / f"{name}.log"
        self._say(f"[{self._started}/{self.runs}] {name}: training, see {log}")
        child = run_process.start(program, [*flags, "--out", str(self._folder), "--name", name], log)
        try:
            child.wait()
        finally:
            run_process.end([child])
        found = run_process.folders(self._folder, name)
        if child.returncode or not found:
            error = run_process.failure(log, child.returncode)
            self._say(f"{name}: {error}")
            raise RunError(error)
        return found[0]

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)
