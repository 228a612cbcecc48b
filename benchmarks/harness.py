"""The options that benchmarks share, and the rounds in which a comparison is measured."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from benchmarks import report
from benchmarks.report import Figures
from benchmarks.runs import RunFailed
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count

WIDTH = 120  # characters of a line where the output is not a terminal


@dataclass(frozen=True)
class Case:
    """A comparison.

    Attributes:
        name: what is compared.
        contenders: by name, a function that makes one run in a fresh process.
        ratios: pairs of contenders, the first divided by the second.
        ratio_of: the figure that is divided.
    """

    name: str
    contenders: Mapping[str, Callable[[], Figures]]
    ratios: Sequence[tuple[str, str]] = ()
    ratio_of: str = "images_per_second"


def parser(name: str, description: str | None) -> exits.Parser:
    """Returns a parser with the options that all benchmarks share."""
    made = exits.Parser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--repeats", type=int, default=5, help="rounds of runs (default: 5)")
    made.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="auto: the GPU if any")
    return made


def parse(parser: exits.Parser) -> Namespace:
    """Parses the command line and resolves --accelerator to cpu or gpu.

    Raises:
        UsageError: a value makes no sense, or there is no GPU.
    """
    given = parser.parse_args()
    for name in ("repeats", "steps"):
        value = getattr(given, name, None)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}")
    gpus = gpu_count() if given.accelerator != "cpu" else 0
    if given.accelerator == "gpu" and not gpus:
        raise UsageError("--accelerator gpu: torch finds no GPU on this machine")
    given.accelerator = "gpu" if gpus else "cpu"
    exits.stop_at_signals()
    return given


def compare(name: str, cases: Sequence[Case], given: Namespace) -> int:
    """Measures every case and prints its table; progress goes to the standard error.

    Returns:
        The exit code: 1 if a run failed.
    """
    progress = Console(stderr=True, highlight=False)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(report.heading(name, given.repeats, given.accelerator), markup=False, soft_wrap=True)
    total, done, failures = given.repeats * sum(len(case.contenders) for case in cases), 0, 0
    for case in cases:
        runs: dict[str, list[Figures | None]] = {contender: [] for contender in case.contenders}
        failed: dict[str, RunFailed] = {}
        for repeat in range(given.repeats):
            # Every other round is in reverse order, so that a machine that warms up or slows down favours no contender.
            for contender in list(case.contenders)[:: -1 if repeat % 2 else 1]:
                done += 1
                progress.print(f"run {done} of {total}: {case.name}: {contender}", markup=False, soft_wrap=True)
                try:
                    runs[contender].append(case.contenders[contender]())
                except RunFailed as failure:
                    runs[contender].append(None)
                    failed[contender] = failure
        console.print(f"\n[bold]{escape(case.name)}[/]")
        console.print(report.table(runs, case.ratios, case.ratio_of))
        for contender, failure in failed.items():
            console.print(f"failed: {contender} {failure}", markup=False, soft_wrap=True)
        failures += len(failed)
    return 1 if failures else 0
