"""The values that numbers among the options may take; plain Python, for the command line."""

import math
from typing import Any


def check_range(name: str, value: float, below: float = math.inf) -> None:
    """Raises ValueError where a value is negative, not a number, or not below a limit."""
    if not 0 <= value < below:
        limit = "" if below == math.inf else f" and under {below:g}"
        raise ValueError(f"{name} must be at least 0{limit}, not {value}")


def check_over_zero(name: str, value: float) -> None:
    """Raises ValueError where a value is not over 0, not a number, or infinite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be over 0 and finite, not {value}")


def check_not_negative(options: Any, *names: str) -> None:
    """Raises ValueError where one of these fields of `options` is negative, not a number, or infinite."""
    for name in names:
        if not 0 <= getattr(options, name) < math.inf:
            raise ValueError(f"{name} must be finite and not negative, not {getattr(options, name)}")


def check_positive(options: Any, *names: str) -> None:
    """Raises ValueError where one of these fields of `options` is not over 0, not a number, or infinite."""
    for name in names:
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"{name} must be greater than 0, not {getattr(options, name)}")
