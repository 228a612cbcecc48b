"""Chooses a strategy from the plan, and says why."""

from collections.abc import Sequence

from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.planning.machine import Room
from cifar_zero.planning.survey import Need

RULE = "the first row that fits: without offloading, else offloaded to the host, else to disk"


def recommended(needs: Sequence[Need], room: Room) -> tuple[Need | None, str]:
    """Returns the strategy that RULE recommends and its figures, or None and what is missing.

    Args:
        needs: in the order of recommendation.
        room: what is available to a rank.

    Raises:
        UsageError: train.py would refuse every strategy; the message is the one for the simplest strategy.
    """
    accepted = [need for need in needs if not need.refused]
    if not accepted:
        raise UsageError(needs[0].refused)
    too_large: list[str] = []
    for need in accepted:
        # SuperOffload is for the fast links of a GH200, which cannot be detected: only the user can choose it.
        if need.fits and not STRATEGIES[need.strategy].super_offload:
            sizes = f"{gigabytes(need.compared(room))} of the {gigabytes(room.device)} GB available to a rank"
            others = f"; {', '.join(too_large)} would not fit" if too_large else ""
            return need, f"{need.strategy} needs {sizes}{others}"
        too_large += [] if need.fits else [need.strategy]
    return None, _nothing_fits(accepted, room)


def _nothing_fits(needs: Sequence[Need], room: Room) -> str:
    """Returns what is missing for the strategy that needs the least, and what to do."""
    least = min(needs, key=lambda need: ("device" in need.lacking(room), need.device))
    missing = (
        f"{gigabytes(size)} GB of {place} memory, of which {gigabytes(most)} GB are available"
        for place, (size, most) in least.lacking(room).items()
    )
    said = f"nothing fits: {least.strategy}, which needs the least, needs {' and '.join(missing)}; use more devices"
    smaller = ", a smaller --batch_size, a larger --accumulate or --activation_checkpointing"
    return said if least.activations is None else said + smaller


def gigabytes(size: int) -> str:
    """Returns a size in GB (10^9 bytes) with a suitable number of digits."""
    return f"{size / 1e9:,.{0 if size >= 100e9 else 1 if size >= 1e9 else 2}f}"
