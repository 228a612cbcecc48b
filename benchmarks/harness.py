"""Runs the contenders of a comparison in turn, again and again, and prints what came of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks import report
from benchmarks.case import Case
from benchmarks.options import Options
from benchmarks.others import Others
from benchmarks.processes import RunFailed


def compare(title: str, cases: Sequence[Case], options: Options) -> int:
    """Measures all cases and prints a table of each; progress goes to the standard error.

    Returns:
        The exit code: 1 where a run failed, which its row and the end of its output tell.
    """
    progress = Console(stderr=True, highlight=False)
    total = options.repeats * sum(len(case.contenders) for case in cases)
    done, others = 0, Others()
    for case in cases:
        case.figures = {name: [] for name in case.contenders}
        for repeat in range(options.repeats):
            # The other way round each time: what warms up or slows down over time favours nobody.
            for name in list(case.contenders)[:: -1 if repeat % 2 else 1]:
                done += 1
                progress.print(f"run {done} of {total}: {case.name}: {name}", markup=False, soft_wrap=True)
                try:
                    case.figures[name].append(case.contenders[name]())
                except RunFailed as failure:
                    case.figures[name].append(None)
                    case.failures[name] = str(failure)
                    progress.print(f"failed: {failure}", markup=False, soft_wrap=True)
    report.show(title, cases, options, others)
    return 1 if any(case.failures for case in cases) else 0


def heed_sigterm() -> None:
    """Makes a request to end leave as Ctrl-C does, so that runs are ended and the scratch directory is removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
