"""The plan of a run's memory: a table of the strategies, one over numbers of devices, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from planning.recommend import gigabytes
from planning.survey import Need

WIDE = 120
"""Columns of a terminal from which the table has all its parts."""


def print_plan(needs: Sequence[Need], console: Console) -> None:
    """Prints a row for each strategy: GB (10^9 bytes) on the fullest rank.

    Args:
        needs: of the strategies.
        console: where to; a narrow one gets the model states as one figure.
    """
    wide = console.width >= WIDE
    disk = any(need.disk for need in needs if need.states is not None and not need.refused)
    parts = ("parameters", "gradients", "optimizer") if wide else ("states",)
    headings = (
        *parts,
        "buckets",
        "activations" if wide else "activ.",
        "device",
        "host",
        *(("disk",) if disk else ()),
        "fits",
        "images",
    )
    table = _table(headings, wide)
    for need in needs:
        table.add_row(_short(need.strategy, console), *_cells(need, wide, disk))
    console.print(table)
    console.print(_notes(needs, console))


def _table(headings: Iterable[str], wide: bool, first: str = "GB a rank") -> Table:
    table = Table(first, *headings, box=box.SIMPLE, padding=(0, int(wide), 0, 0), pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for column in table.columns:
        column.no_wrap = True
    return table


def _short(strategy: str, console: Console) -> str:
    return strategy if console.width >= WIDE else strategy.removeprefix("deepspeed_")


def _notes(needs: Sequence[Need], console: Console) -> str:
    """What the columns mean, and why strategies are left out."""
    lines = [
        "device: the most at any time, buckets and activations or what the update takes; images: the largest "
        "micro-batch that fits"
    ]
    if console.width < WIDE:
        lines.append("stage_*: deepspeed_stage_*; activ.: activations")
    reasons: dict[str, list[str]] = {}
    for need in needs:
        reason = need.refused.replace(f"--strategy {need.strategy}", "it")
        reason = reason or ("no formula: layers are cut in its own way" if need.states is None else "")
        if reason:
            reasons.setdefault(reason, []).append(need.strategy)
    lines += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    wanted = dict.fromkeys(need.wanted for need in needs if need.wanted and not need.refused)
    lines += [f"lacking on this machine: {want}" for want in wanted]
    begun = [need for need in needs if need.states is not None and not need.refused]
    largest = [need.strategy for need in begun if need.device == need.starting > 0 and need.device > need.in_training]
    if largest:
        lines.append(f"device of {', '.join(largest)}: the network as it is built, which is more than training takes")
    return "\n".join(lines)


def _cells(need: Need, wide: bool, disk: bool) -> list[str]:
    if need.states is None:
        return ["-"] * (6 + (3 if wide else 1) + disk)
    device = need.states.device
    parts = (device.parameters, device.gradients, device.optimizer) if wide else (device.total,)
    sizes = [*parts, need.buckets, need.activations, need.device, need.host, *((need.disk,) if disk else ())]
    fits = "no" if not need.fits else "yes" if not need.refused else "-"
    images = "-" if need.most_images is None else f"{need.most_images:,}"
    return ["-" if size is None else gigabytes(size) if size else "0" for size in sizes] + [fits, images]


def print_scaling(by_devices: Mapping[int, Sequence[Need]], room: int, console: Console) -> None:
    """Prints GB on the fullest rank by strategy and number of devices; what fits has a star.

    Args:
        by_devices: the needs for each number of devices, the micro-batch being the same.
        room: bytes that a rank may take on its device.
        console: where to.
    """
    table = _table(map(str, by_devices), console.width >= WIDE)
    for row in zip(*by_devices.values(), strict=True):
        if row[0].states is not None:
            cells = (f"{gigabytes(need.device)}{'*' if need.device <= room else ' '}" for need in row)
            table.add_row(_short(row[0].strategy, console), *cells)
    console.print(table)
    console.print("*: fits the device" + ("; stage_*: deepspeed_stage_*" if console.width < WIDE else ""))


def print_communication(
    needs: Sequence[Need], bandwidth: float | None, step_time: float | None, console: Console
) -> None:
    """Prints what each strategy sends in a step, and how long that takes if the bandwidth is known.

    Args:
        needs: of the strategies.
        bandwidth: bytes per second of the slowest link; None if it is not known.
        step_time: seconds of a step without communication; None where it is not known.
        console: where to.
    """
    headings = ["sent, MB a rank and step", "calls"]
    headings += ["communication, s"] if bandwidth is not None else []
    headings += ["step, s"] if bandwidth is not None and step_time is not None else []
    table = _table(headings, wide=True, first="communication")
    for need in needs:
        if need.traffic is not None and not need.refused:
            seconds = need.seconds(bandwidth)
            times = [] if seconds is None else [seconds] if step_time is None else [seconds, seconds + step_time]
            sizes = f"{need.traffic.sent_bytes / 1e6:,.1f}", f"{need.traffic.collectives:,}"
            table.add_row(_short(need.strategy, console), *sizes, *(f"{time:.3g}" for time in times))
    console.print(table)
    notes = "sent: to other ranks in an optimizer step; calls: of collectives, at least so many"
    if bandwidth is not None:
        notes += f"; communication: at {bandwidth / 1e9:.3g} GB/s, without latencies"
        notes += "" if step_time is None else "; step: at most, where nothing of it overlaps the computing"
    console.print(notes)


def as_json(
    needs: Sequence[Need], about: Mapping[str, Any], bandwidth: float | None = None, step_time: float | None = None
) -> dict[str, Any]:
    """The plan for programs, all sizes in bytes and times in seconds.

    Args:
        needs: of the strategies.
        about: what it is a plan of, and what it comes to.
        bandwidth: bytes per second of the slowest link; None if it is not known.
        step_time: of a step without communication; None where it is not known.
    """
    rows = []
    for need in needs:
        sums = {} if need.states is None else {"device": need.device, "host": need.host, "disk": need.disk}
        seconds = need.seconds(bandwidth)
        step = None if seconds is None or step_time is None else seconds + step_time
        rows.append({**asdict(need), **sums, "communication_seconds": seconds, "step_seconds": step})
    return {"schema": 1, **about, "strategies": rows}
