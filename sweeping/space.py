"""What is searched: options of train.py, each with values or a range; plain Python.

optimizer.lr=0.1,0.01,0.001     these values
optimizer.lr=1e-4..1e-1:log     anything between, evenly over the orders of magnitude
batch_size=32..256:32           from 32 to 256 in steps of 32
augment.crop=0..8               whole numbers, as the option takes no others
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from errors import UsageError

SEED = "seed"
"""A setting is repeated with each of its values."""

CONFIG = "config"
"""Not an option of a run: each of its values is a recipe."""

NOT_SEARCHED = ("out", "name", "logger", "hparams", "log_interval", "plot_schedule", "debug", "trust", "resume")
NOT_SEARCHED += ("bench_steps", "find_lr", "print_config", "num_nodes")
"""Options that change no result, or that sweep.py gives itself."""

RANGE = re.compile(r"([-+]?[\d.]+(?:[eE][-+]?\d+)?)\.\.([-+]?[\d.]+(?:[eE][-+]?\d+)?)(?::(\S+))?")
"""LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP."""

EXAMPLE = "for instance optimizer.lr=1e-4..1e-1:log or model.width=0.25,0.5"

Setting = dict[str, str]
"""An option's value for each parameter, as they are written on a command line."""


@dataclass(frozen=True)
class Values:
    """An option, one of some values."""

    name: str
    values: tuple[str, ...]

    @property
    def ends(self) -> tuple[str, ...]:
        """All of them."""
        return self.values

    @property
    def written(self) -> str:
        """As behind the = of --search."""
        return ",".join(self.values)


@dataclass(frozen=True)
class Range:
    """An option, a number from a lowest to a highest."""

    name: str
    low: str
    high: str
    log: bool = False
    step: str | None = None

    @property
    def ends(self) -> tuple[str, ...]:
        """The lowest and the highest."""
        return self.low, self.high

    @property
    def written(self) -> str:
        """As behind the = of --search."""
        suffix = "log" if self.log else self.step
        return f"{self.low}..{self.high}" + (f":{suffix}" if suffix else "")


@dataclass
class Space:
    """All that is searched."""

    parameters: list[Values | Range] = field(default_factory=list)
    seeds: tuple[str, ...] = ()
    """Of each setting; empty: train.py's."""

    @property
    def is_grid(self) -> bool:
        """Whether all combinations can be tried."""
        return all(isinstance(parameter, Values) for parameter in self.parameters)

    def combinations(self) -> list[Setting]:
        """All of a grid; of ranges both ends."""
        names = [parameter.name for parameter in self.parameters]
        return [dict(zip(names, ends, strict=True)) for ends in product(*(each.ends for each in self.parameters))]

    @property
    def size(self) -> int:
        """Of a grid its settings; of ranges both ends."""
        return math.prod(len(parameter.ends) for parameter in self.parameters)

    def combination(self, number: int) -> Setting:
        """The one of `combinations` at this place, of which there may be too many to list."""
        setting: Setting = {}
        for parameter in reversed(self.parameters):
            number, place = divmod(number, len(parameter.ends))
            setting[parameter.name] = parameter.ends[place]
        return {parameter.name: setting[parameter.name] for parameter in self.parameters}

    def one_by_one(self) -> list[Setting]:
        """Each value, and both ends of each range, with the first of all others."""
        first = {parameter.name: parameter.ends[0] for parameter in self.parameters}
        return [first, *({**first, each.name: end} for each in self.parameters for end in each.ends[1:])]


def space(definitions: Sequence[str], file: str = "") -> Space:
    """The space of --search, and of the --space file before it.

    Raises:
        UsageError: a definition cannot be read, or there are none.
    """
    made = Space()
    given = [*(_from_file(file) if file else []), *(_split(text) for text in definitions)]
    for name, text in given:
        if name in NOT_SEARCHED:
            raise UsageError(f"--search {name}: it changes no result, or sweep.py gives it itself")
        if (made.seeds and name == SEED) or name in [parameter.name for parameter in made.parameters]:
            raise UsageError(f"--search {name} is there twice")
        parameter = _parameter(name, text)
        if name != SEED:
            made.parameters.append(parameter)
        elif isinstance(parameter, Values):
            made.seeds = parameter.values
        else:
            raise UsageError(f"--search seed={text}: name the seeds that each setting is repeated with, seed=0,1,2")
    if not given:
        raise UsageError(f"nothing to search: give --search NAME=VALUES, {EXAMPLE}")
    return made


def is_number(value: Any) -> bool:
    """Whether an option's value may come from a range."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _split(text: str) -> tuple[str, str]:
    name, found, values = text.partition("=")
    if not found or not name or not values:
        raise UsageError(f"--search {text}: write NAME=VALUES, {EXAMPLE}")
    return name.removeprefix("--"), values


def _from_file(file: str) -> list[tuple[str, str]]:
    """Of a YAML mapping from names to lists or to what stands behind the = of --search."""
    try:
        tree = yaml.safe_load(Path(file).read_text())
    except OSError as error:
        raise UsageError(f"--space {file} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--space {file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, Mapping) or not all(isinstance(key, str) for key in tree):
        raise UsageError(f"--space {file} must be a mapping such as 'optimizer.lr: 1e-4..1e-1:log'")
    found = []
    for name, value in tree.items():
        if isinstance(value, dict) or value is None or value == []:
            raise UsageError(f"--space {file}: {name} needs a list or a range; names are written as model.width")
        values = value if isinstance(value, list) else [value]
        found.append((name, ",".join(each if isinstance(each, str) else _yaml(each) for each in values)))
    return found


def _yaml(value: Any) -> str:
    """A value as a flag takes it."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _parameter(name: str, text: str) -> Values | Range:
    found = RANGE.fullmatch(text)
    return _values(name, text) if found is None else _range(name, *found.groups())


def _values(name: str, text: str) -> Values:
    values = _parts(text)
    if "" in values or len({*values}) < len(values):
        raise UsageError(f"--search {name}={text}: a value is empty or there twice")
    if any(value.startswith("--") for value in values):  # train.py would take it for one: a --space file's --trust
        raise UsageError(f"--search {name}={text}: a value must not be a flag")
    return Values(name, tuple(values))


def _parts(text: str) -> list[str]:
    """What lies between commas, less those within a value that is a list or a mapping itself."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _range(name: str, low: str, high: str, suffix: str | None) -> Range:
    shown = f"--search {name}={low}..{high}" + (f":{suffix}" if suffix else "")
    log, step = suffix == "log", None
    try:
        bottom, top = Decimal(low), Decimal(high)
        if suffix and not log:
            step = Decimal(suffix)
    except InvalidOperation as error:
        raise UsageError(f"{shown}: a range is LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP, in numbers") from error
    if not bottom < top:
        raise UsageError(f"{shown}: a range begins with the lower number")
    if log and bottom <= 0:
        raise UsageError(f"{shown}: a log range begins above 0")
    if step is not None and (not step > 0 or (top - bottom) % step):
        raise UsageError(f"{shown}: whole steps must lead from the lower number to the higher")
    return Range(name, low, high, log, suffix if step is not None else None)
