"""Checks the range of numeric options; plain Python, for the command line."""

import math
from typing import Any


def check_range(
    options: Any,
    *names: str,
    at_least: float = 0,
    over: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raises ValueError unless each named field of a dataclass, or each number in it, is finite and in the range.

    Limits are inclusive (`at_least`, `at_most`) or exclusive (`over`, `below`); `over` replaces `at_least`.
    """
    limits = [f"at least {at_least}" if over is None else f"over {over}"]
    limits += [f"under {below}"] if below is not None else []
    limits += [f"at most {at_most}"] if at_most is not None else []
    for name in names:
        field = getattr(options, name)
        for value in field if isinstance(field, (tuple, list)) else [field]:
            enough = value >= at_least if over is None else value > over
            small = (below is None or value < below) and (at_most is None or value <= at_most)
            if not (enough and small and math.isfinite(value)):
                finite = [] if math.isfinite(value) else ["finite"]
                raise ValueError(f"{name} must be {' and '.join(limits + finite)}, not {value}")
