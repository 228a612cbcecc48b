"""Which strategy to take, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from errors import UsageError
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


def refuse_if_none_runs(needs: Sequence[Need]) -> None:
    """Refuses what no strategy can do, with the words of the simplest; raises UsageError."""
    if least(needs) is None:
        raise UsageError(needs[0].refused)


def why(need: Need, needs: Iterable[Need], room: Room) -> str:
    """The figures of a recommendation in half a sentence; `needs` in the registry's order."""
    took = need.both if room.shared else need.device
    said = f"{gigabytes(took)} of the {gigabytes(room.device)} GB that a rank may take"
    order = [*STRATEGIES]
    tighter = [
        other.strategy
        for other in needs
        if other.states is not None
        and not (other.refused or other.fits)
        and (other.moved, order.index(other.strategy)) < (need.moved, order.index(need.strategy))
    ]
    return f"{said}; faster ones need more: {', '.join(tighter)}" if tighter else said


def nothing_fits(needs: Sequence[Need], room: Room) -> str:
    """What lacks, and what to do, where no strategy fits of those that run."""
    on_device = [need for need in needs if need.states is not None and "the device" not in room.lacking(need)]
    nearest = least(on_device) or least(needs)
    assert nearest is not None
    sizes = {
        "the device": (nearest.both if room.shared else nearest.device, room.device),
        "the CPU's memory": (nearest.host, room.host or 0),
        "the disk": (nearest.disk, room.disk or 0),
    }
    lacking = {name: sizes[name] for name in room.lacking(nearest)}
    parts = (
        f"{gigabytes(size)} GB of {name}, where it may take {gigabytes(most)}" for name, (size, most) in lacking.items()
    )
    said = f"nothing fits: a rank of {nearest.strategy}, which needs the least, needs {' and '.join(parts)}"
    batch = ", a smaller --batch_size, more --accumulate or --activation_checkpointing"
    return f"{said}; take more devices{'' if nearest.activations is None else batch}"


def gigabytes(size: int) -> str:
    """10^9 bytes, with as many digits as matter."""
    return f"{size / 1e9:,.{0 if size >= 100e9 else 1 if size >= 1e9 else 2}f}"
