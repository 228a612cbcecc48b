"""The table at the start of a run over several machines: which rank is where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from meeting import Place


def print_ranks(places: Sequence[Place], console: Console | None = None) -> None:
    """Prints a line for each rank.

    Args:
        places: of all ranks, in their order.
        console: where to; the standard error, where none is given.
    """
    table = Table("rank", "host", "address", "local rank", "device", "threads")
    for place in places:
        cells = (place.rank, place.host, place.address, place.local_rank, place.device, place.threads)
        table.add_row(*map(str, cells))
    (console or Console(stderr=True)).print(table)
