"""Which strategy to take, and why."""

from __future__ import annotations

from collections.abc import Iterable

from planning.survey import Need, Room
from strategies import STRATEGIES

RULE = "of those that fit the one that moves the fewest numbers: none to a disk before none to the host before few to \
other ranks; among equals the one that shards the least"


def recommended(needs: Iterable[Need]) -> Need | None:
    """The strategy that follows from RULE; None where nothing fits that train.py would run.

    Args:
        needs: in the registry's order, which goes from what shards nothing to what shards all.
    """
    # SuperOffload is for the links of a GH200, and no machine says that it has them: who has names it.
    able = (need for need in needs if need.fits and not need.refused and not STRATEGIES[need.strategy].super_offload)
    return min(able, key=lambda need: need.moved, default=None)


def least(needs: Iterable[Need]) -> Need | None:
    """The strategy that takes the least of the device, of those that train.py would run."""
    runs = (need for need in needs if need.states is not None and not need.refused)
    return min(runs, key=lambda need: need.device, default=None)


def why(need: Need, needs: Iterable[Need], room: Room) -> str:
    """The figures of a recommendation in half a sentence."""
    took = need.both if room.shared else need.device
    said = f"{gigabytes(took)} of the {gigabytes(room.device)} GB that a rank may take"
    known = (other for other in needs if other.states is not None and not other.refused and not other.fits)
    tighter = [other.strategy for other in known if other.moved <= need.moved]
    return f"{said}; faster ones need more: {', '.join(tighter)}" if tighter else said


def nothing_fits(needs: Iterable[Need], room: Room) -> str:
    """What to do where no strategy fits."""
    nearest = least(needs)
    if nearest is None:
        return "no strategy can run this"
    return (
        f"nothing fits into the {gigabytes(room.device)} GB that a rank may take: {nearest.strategy}, which needs the "
        f"least, needs {gigabytes(nearest.device)} GB there and {gigabytes(nearest.host)} GB of the CPU's memory; "
        "take more devices, a smaller --batch_size, more --accumulate or --activation_checkpointing"
    )


def gigabytes(size: int) -> str:
    """10^9 bytes, with as many digits as matter."""
    return f"{size / 1e9:,.{0 if size >= 100e9 else 1 if size >= 1e9 else 2}f}"
