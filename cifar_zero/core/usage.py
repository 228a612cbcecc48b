"""For errors in the command line: limits of numbers, and names that the user may have meant; plain Python."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import ge, gt, le, lt
from typing import Any, TypeVar

from cifar_zero.core.errors import UsageError

Value = TypeVar("Value")

Rules = dict[str, bool]
"""Errors, and whether each is one."""

MAY_CHANGE = {"may_change_on_resume": True}
"""Metadata of a field of the recipe that a resumed run may have another value of."""

SHOWN = 20  # most names that an error lists

LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]]
LIMITS = {"at_least": ("at least", ge), "over": ("over", gt), "below": ("under", lt), "at_most": ("at most", le)}
"""Limits of `limited`: in words, and what a number within them holds."""


def refuse(rules: Mapping[str, bool]) -> None:
    """Raises UsageError with the first error that is one."""
    for message, broken in rules.items():
        if broken:
            raise UsageError(message)


def nearest(word: str, words: Iterable[str], most: int = 1, cutoff: float = 0.5, otherwise: str = "") -> str:
    """Returns half a sentence with the closest of `words`; if none is close, with `otherwise` or the first of them."""
    known = list(words)
    if close := difflib.get_close_matches(word, known, most, cutoff):
        return f"did you mean {' or '.join(close)}?"
    return otherwise or f"choose from {', '.join(known[:SHOWN])}{', ...' if len(known) > SHOWN else ''}"


def nearest_flag(key: str, known: Iterable[str]) -> str:
    """Returns the same for a flag, which may lack its section; both arguments are without dashes."""
    flags = sorted(known)
    parts = [flag for flag in flags if flag.endswith(f".{key}") or flag.startswith(f"{key}.")]
    if parts:
        return nearest(f"--{key}", (f"--{flag}" for flag in parts), cutoff=0)
    return nearest(f"--{key}", (f"--{flag}" for flag in flags), cutoff=0.65, otherwise="--help all lists all options")


def check_numbers(options: Any) -> None:
    """Raises ValueError unless each number in a dataclass's fields is finite and within its limits, see `limited`."""
    for option in fields(options):
        value = getattr(options, option.name)
        limits = {name: option.metadata[name] for name in LIMITS if name in option.metadata}
        if "over" not in limits:
            limits.setdefault("at_least", 0)
        wanted = " and ".join(f"{LIMITS[name][0]} {limits[name]}" for name in LIMITS if name in limits)
        for number in value if isinstance(value, (tuple, list)) else [value]:
            if not isinstance(number, (int, float)):
                continue
            if not math.isfinite(number):
                raise ValueError(f"{option.name} must be {wanted} and finite, not {number}")
            if not all(LIMITS[name][1](number, limit) for name, limit in limits.items()):
                raise ValueError(f"{option.name} must be {wanted}, not {number}")


def limited(default: Value, may_change_on_resume: bool = False, **limits: float) -> Value:
    """Returns a field with other limits of its numbers than at least 0. Limits are inclusive (`at_least`, `at_most`) or
    exclusive (`over`, `below`); `over` replaces `at_least`. A resumed run keeps its recipe, unless a field says that it
    `may_change_on_resume`."""
    return field(default=default, metadata={"may_change_on_resume": may_change_on_resume, **limits})


@dataclass
class Options:
    """Base of the options of models, optimizers and schedules, whose numbers are finite and within their limits. Raises
    ValueError, which names the first option that is not."""

    def __post_init__(self) -> None:
        check_numbers(self)
