"""Prints the plan: a table of the strategies, and one over numbers of devices."""

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from cifar_zero.planning.survey import Need, gigabytes

WIDE = 132
"""Width of a terminal, in characters, from which the table shows all columns."""


def print_plan(needs: Sequence[Need], console: Console) -> None:
    """Prints a row for each strategy, in GB (10^9 bytes) on the fullest rank, and notes; a narrow console shows the
    model states as one figure."""
    wide = console.width >= WIDE
    has_disk = any(need.disk for need in needs if not need.refused)
    parts = ["parameters", "gradients", "optimizer", "buckets", "activations"] if wide else ["states", "activ."]
    table = _table([*parts, "device", "host", *["disk"] * has_disk, "sent, MB", "fits", "images"], wide)
    for need in needs:
        states = need.states.device
        split = [states.parameters, states.gradients, states.optimizer, need.buckets] if wide else [states.total]
        sizes = [*split, need.activations, need.device, need.host, *[need.disk] * has_disk]
        cells = ["-" if size is None else gigabytes(size) if size else "0" for size in sizes]
        fits = "-" if need.refused else "yes" if need.fits else "no"
        images = "-" if need.most_images is None else f"{need.most_images:,}"
        table.add_row(_short(need.strategy, console), *cells, f"{need.sent_bytes / 1e6:,.0f}", fits, images)
    console.print(table)
    console.print("\n".join(_notes(needs, console)))


def _table(headings: Iterable[str], wide: bool) -> Table:
    table = Table("GB per rank", *headings, box=box.SIMPLE, padding=(0, int(wide), 0, 0), pad_edge=False)
    for column in table.columns:
        column.justify = "left" if column.header == "GB per rank" else "right"
        column.no_wrap = True
    return table


def _short(strategy: str, console: Console) -> str:
    return strategy if console.width >= WIDE else strategy.removeprefix("deepspeed_")


def _notes(needs: Sequence[Need], console: Console) -> list[str]:
    """Returns what the columns mean, and why strategies are refused."""
    lines = ["device, host: the peak; sent: to other ranks in a step; images: the largest micro-batch that fits"]
    if console.width < WIDE:
        lines.append("stage_*: deepspeed_stage_*; activ.: activations")
    reasons: dict[str, list[str]] = {}
    for need in needs:
        if need.refused:
            reason = need.refused.replace(f"--strategy {need.strategy}", "it")
            reasons.setdefault(reason, []).append(need.strategy)
    lines += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return lines


def print_scaling(by_devices: Mapping[int, Sequence[Need]], room: int, console: Console) -> None:
    """Prints GB on the fullest rank by strategy and number of devices; a star marks what fits the `room` bytes that a
    rank may use on its device."""
    table = _table(map(str, by_devices), console.width >= WIDE)
    for row in zip(*by_devices.values(), strict=True):
        cells = (f"{gigabytes(need.device)}{'*' if need.device <= room else ' '}" for need in row)
        table.add_row(_short(row[0].strategy, console), *cells)
    console.print(table)
    console.print("*: fits the device" + ("; stage_*: deepspeed_stage_*" if console.width < WIDE else ""))
