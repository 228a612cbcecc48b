"""The values that numbers among the options may take; plain Python, for the command line."""

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
    """Raises ValueError unless each of these fields of `options`, or each number in it, is finite and in the range.

    Args:
        options: a dataclass.
        names: of its fields.
        at_least: smallest value that is allowed, where there is no `over`.
        over: largest value that is too small.
        below: smallest value that is too large.
        at_most: largest value that is allowed.
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
