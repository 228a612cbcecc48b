"""Helpers that check options: rules with error messages, limits of numbers, and suggestions for misspelled names."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, TypeVar

from cifar_zero.core.errors import UsageError
from stepcheck.usage import nearest

Value = TypeVar("Value")

Rules = dict[str, object]
"""Maps each error message to a value that is true if the rule of this message is broken."""

MAY_CHANGE = {"may_change_on_resume": True}  # metadata of a field that a resumed run may change

LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "at_least": ("at least", ge),
    "over": ("over", gt),
    "below": ("under", lt),
    "at_most": ("at most", le),
}
"""The limits that `limited` accepts, each with its name in words, and a comparison that is true for a number within the
limit."""


def refuse(rules: Rules) -> None:
    """Raises UsageError for the first broken rule."""
    for message, broken in rules.items():
        if broken:
            raise UsageError(message)


def delta_file(path: str) -> str:
    """Converts the value of --delta, for argparse. Raises UsageError if the file does not exist."""
    if path and not Path(path).is_file():
        raise UsageError(f"--delta {path} does not exist, or is not a file")
    return path


def nearest_flag(key: str, known: Iterable[str]) -> str:
    """Returns a clause that suggests one of the `known` flags for a misspelled flag, a flag without its section, or a
    section without its flag, and otherwise refers to --help all. `key` and `known` have no dashes."""
    word, flags = f"--{key}", [f"--{flag}" for flag in sorted(known)]
    parts = [flag for flag in flags if flag.endswith(f".{key}") or flag.startswith(f"{word}.")]
    if parts:
        return nearest(word, parts, cutoff=0)
    return nearest(word, flags, cutoff=0.65, otherwise="--help all lists all options")


def check_numbers(options: Any) -> None:
    """Raises ValueError unless all numbers in the fields of a dataclass are finite and within their limits
    (`limited`)."""
    for option in fields(options):
        value = getattr(options, option.name)
        limits = {name: option.metadata[name] for name in LIMITS if name in option.metadata}
        if "over" not in limits:
            limits.setdefault("at_least", 0)
        expected = " and ".join(f"{LIMITS[name][0]} {limits[name]}" for name in LIMITS if name in limits)
        for number in value if isinstance(value, (tuple, list)) else [value]:
            if not isinstance(number, (int, float)):
                continue
            if not math.isfinite(number):
                raise ValueError(f"{option.name} must be {expected} and finite, not {number}")
            if not all(LIMITS[name][1](number, limit) for name, limit in limits.items()):
                raise ValueError(f"{option.name} must be {expected}, not {number}")


def limited(default: Value, may_change_on_resume: bool = False, **limits: float) -> Value:
    """Returns a dataclass field with limits for its numbers. Without a lower limit, the numbers must be at least 0.

    Args:
        may_change_on_resume: Whether a resumed run may change the value. Otherwise `resume.check_same_run` refuses
            another value.
        **limits: `at_least` and `at_most` are inclusive, `over` and `below` are exclusive. `over` replaces `at_least`.
    """
    return field(default=default, metadata={"may_change_on_resume": may_change_on_resume, **limits})


@dataclass
class Options:
    """Base class for the options of models, optimizers and schedules. The constructor raises ValueError, which begins
    with the option's name, for a number that is not finite or not within its limits."""

    def __post_init__(self) -> None:
        check_numbers(self)
