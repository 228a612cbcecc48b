"""What --search takes: options of train.py, each with values or a range, as Optuna's distributions."""

import re
from itertools import product
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from cifar_zero.core.errors import UsageError

Space = dict[str, BaseDistribution]
"""The distribution of each option; listed values stay text, as on the command line."""

SEED = "seed"
"""The option that is no part of a setting: each setting is trained with each seed."""

NUMBER = r"([-+]?[\d.]+(?:[eE][-+]?\d+)?)"
RANGE = re.compile(rf"{NUMBER}\.\.{NUMBER}(?::(\S+))?")
"""LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP."""


def parse(definitions: list[str]) -> Space:
    """Returns the space of --search NAME=VALUES ...; raises UsageError if one cannot be read."""
    space: Space = {}
    for definition in definitions:
        name, _, text = definition.partition("=")
        try:
            space[name] = _distribution(text)
        except ValueError as error:
            why = str(error).rstrip(".")
            raise UsageError(f"--search {definition}: {why}; write NAME=A,B or NAME=LOW..HIGH") from error
    if SEED in space and not isinstance(space[SEED], CategoricalDistribution):
        raise UsageError("--search seed takes no range: list the seeds, seed=0,1,2")
    return space


def is_grid(space: Space) -> bool:
    """Whether all combinations can be listed: no option has a range."""
    return all(isinstance(distribution, CategoricalDistribution) for distribution in space.values())


def combinations(space: Space) -> list[dict[str, Any]]:
    """Returns all combinations of the values of a grid."""
    return [dict(zip(space, row, strict=True)) for row in product(*lists(space).values())]


def samples(space: Space) -> list[dict[str, Any]]:
    """Returns combinations in which each value, and each end of a range, occurs."""
    longest = max(map(len, lists(space).values()))
    return [{name: each[place % len(each)] for name, each in lists(space).items()} for place in range(longest)]


def lists(space: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns the listed values of each option, or the lowest and the highest of its range."""
    return {name: [*getattr(each, "choices", ())] or [each.low, each.high] for name, each in space.items()}


def _distribution(text: str) -> BaseDistribution:
    found = RANGE.fullmatch(text)
    if found is None:
        listed = re.split(r",(?![^\[]*\])", text)  # not at the commas within [64,64]
        if "" in listed:
            raise ValueError("a value is missing")
        return CategoricalDistribution(listed)
    low, high, suffix = found.groups()
    log, step = suffix == "log", None if suffix == "log" else suffix
    if all(number.isdecimal() for number in (low, high, step or "1")):
        return IntDistribution(int(low), int(high), log, int(step or 1))
    return FloatDistribution(float(low), float(high), log, float(step) if step else None)
