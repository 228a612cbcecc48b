"""Prints the findings: one line per check, or JSON."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

from cifar_zero.diagnosis.finding import Finding

SCHEMA = 1
"""Version of the output of `--json`; goes up when a key changes its meaning or its name."""

COLORS = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def print_line(name: str, finding: Finding, width: int) -> None:
    """Prints status, name (padded to `width` characters), what was found, and the fix."""
    from rich.console import Console
    from rich.markup import escape

    status = f"[{COLORS[finding.status]}]{finding.status:<7}[/]"
    text = ": ".join(filter(None, [finding.found, finding.fix]))
    Console(highlight=False).print(f"{status}  {name:<{width}}  {escape(text)}", soft_wrap=True)


def summary(findings: Mapping[str, Finding]) -> str:
    """Returns the overall result in one sentence."""
    count = Counter(finding.status for finding in findings.values())
    warnings = f"{count['warning']} warning{'s'[: count['warning'] != 1]}"
    if count["failed"]:
        return f"Not fit to train: {count['failed']} failed, {warnings}."
    return f"Nothing failed, {warnings}."


def as_json(findings: Mapping[str, Finding]) -> str:
    """Returns the findings for programs."""
    checks = [{"name": name, **asdict(finding)} for name, finding in findings.items()]
    return json.dumps({"schema": SCHEMA, "checks": checks}, indent=2)
