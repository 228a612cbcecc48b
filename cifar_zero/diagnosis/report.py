"""What the doctor says: a line for each check on the standard output, and what it waits for on the standard error."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

from cifar_zero.diagnosis.finding import Finding

SCHEMA = 1
"""Of what `--json` prints; goes up when a key changes its meaning."""

COLORS = {"ok": "green", "warning": "yellow", "failed": "bold red"}

FILE_COLUMNS = 10_000
"""Width where the output is no terminal: each check is one line there, however long."""


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """On a terminal: the check that is under way, and for how long it has been."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(name, total=None)
        yield


def print_line(name: str, finding: Finding, name_columns: int) -> None:
    """Prints status, name, what was found, and the mend; on a terminal long texts stay in their column."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=max(map(len, COLORS)))
    line.add_column(width=name_columns)
    line.add_column(overflow="fold")
    text = ": ".join(filter(None, [finding.found, finding.mend]))
    line.add_row(f"[{COLORS[finding.status]}]{finding.status}", name, escape(text))
    Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS).print(line)


def summary(findings: Mapping[str, Finding]) -> str:
    """How the checks came out, in one sentence."""
    count = Counter(finding.status for finding in findings.values())
    warnings = f"{count['warning']} warning{'s'[: count['warning'] != 1]}"
    if count["failed"]:
        return f"Not fit to train: {count['failed']} failed, {warnings}."
    return f"Nothing failed, {warnings}."


def as_json(findings: Mapping[str, Finding]) -> str:
    """The findings for programs."""
    checks = [{"name": name, **asdict(finding)} for name, finding in findings.items()]
    return json.dumps({"schema": SCHEMA, "checks": checks}, indent=2)
