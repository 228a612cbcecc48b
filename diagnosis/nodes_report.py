"""What doctor.py --nodes says: the ranks, a line for each finding, and what was measured; the same for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagnosis import report
from diagnosis.nodes import gigabytes, hosts, of_how_many
from errors import RunError
from planning.link import SCHEMA

if TYPE_CHECKING:
    from diagnosis.nodes import Network

ROWS = 66
"""Pairs that are printed at most, those of 12 machines; of more the slowest."""


def print_network(network: Network) -> None:
    """Prints it for people."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def table(*headings: str) -> Table:
        made = Table(*headings, box=box.SIMPLE, padding=(0, 2, 0, 0), pad_edge=False)
        for column in made.columns[1:]:
            column.no_wrap = True
        return made

    console = Console(highlight=False)
    names = hosts(network.machines)
    nodes = sorted({machine.node for machine in network.machines})
    ranks = table("rank", "machine", "device")
    for machine in network.machines:
        ranks.add_row(str(machine.rank), names[nodes.index(machine.node)], machine.device)
    console.print(ranks)
    for name, finding in network.findings.items():
        report.print_line(name, finding, max(map(len, network.findings)))
    steps = table(f"all-reduce of {len(network.machines)} ranks ({network.backend})", "time", "algorithm", "bus")
    latency, *others = network.ladder
    steps.add_row(_size(latency.size), _time(latency.seconds), "-", "-")
    for step in others:
        steps.add_row(_size(step.size), _time(step.seconds), gigabytes(step.algorithm), gigabytes(step.bus))
    for node, within in network.within.items():
        label = f"{_size(within.size)} within {names[nodes.index(node)]}"
        steps.add_row(label, _time(within.seconds), gigabytes(within.algorithm), gigabytes(within.bus))
    console.print(steps)
    if network.pairs:
        shown = network.pairs if len(network.pairs) <= ROWS else sorted(network.pairs, key=lambda pair: pair.bus)[:ROWS]
        heading = "between machines" + (f", the slowest {ROWS}" if len(shown) < len(network.pairs) else "")
        between = table(heading + of_how_many(len(network.pairs), len(names)), "latency", "each way")
        for pair in shown:
            label = " - ".join(names[at] for at in pair.nodes)
            between.add_row(label, _time(pair.seconds), gigabytes(pair.bus))
        console.print(between)
    print(report.summary(network.findings))


def as_json(network: Network) -> dict[str, Any]:
    """It for programs: bytes, seconds, bytes a second. planning/link.py reads the first ones."""
    return {
        "schema": SCHEMA,
        "bus_bytes_per_second": max(step.bus for step in network.ladder),
        "latency_seconds": network.ladder[0].seconds,
        "backend": network.backend,
        "ranks": [asdict(machine) for machine in network.machines],
        "checks": [{"name": name, **asdict(finding)} for name, finding in network.findings.items()],
        "all_reduce": [{**asdict(step), "algorithm": step.algorithm} for step in network.ladder],
        "within": {str(node): asdict(within) for node, within in network.within.items()},
        "pairs": [asdict(pair) for pair in network.pairs],
    }


def cannot_save(file: Path) -> str:
    """Why a file cannot be written; empty where it can. It is left as it was."""
    there = file.exists()
    try:
        with file.open("a"):
            pass
        if not there:
            file.unlink()
    except OSError as error:
        return f"--save {file} cannot be written: {error.strerror}"
    return ""


def save(network: Network, file: Path) -> None:
    """Writes the JSON to a file; raises RunError where it cannot."""
    try:
        file.write_text(json.dumps(as_json(network), indent=1) + "\n")
    except OSError as error:
        raise RunError(f"--save {file} cannot be written: {error.strerror}") from error


def _size(count: int) -> str:
    """Bytes in powers of two, in which they are chosen."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-2 else f"{seconds * 1e3:,.0f} ms"
