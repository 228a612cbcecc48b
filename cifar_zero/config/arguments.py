"""Splits a command line into its options and their values, as they are written. Types come later, from the fields of
Recipe, Placement and Output; here an option is a name, and a value is a text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from cifar_zero.config.settings import OWNERS, Consent
from cifar_zero.core.errors import UsageError

SWITCHES = {
    *("trust", "print_config", "debug"),
    *(option.name for part in OWNERS.values() for option in fields(part) if option.default is False),
}
"""Options that need no value."""

PLOT = "OUT/schedule.png"  # what --plot_schedule without a value names, with the folder --out

OPTIONAL = {**dict.fromkeys(SWITCHES, True), "help": "", "plot_schedule": PLOT}
"""Options that need no value, and the value that they have without one."""

LISTS = {"logger", "trainable", "wandb_tags", "lora.target"}
"""Options that take several values."""

IGNORED = {"local_rank"}  # given by DeepSpeed's launcher, which sets LOCAL_RANK too

CALLBACKS = "trainer.callbacks"  # the one option that names classes: jsonargparse gets it as it is written


@dataclass
class Arguments:
    """What a command line says."""

    options: dict[str, Any] = field(default_factory=dict)  # value by option: a text, a list of texts, or true
    recipes: list[str] = field(default_factory=list)  # the files of --config, in their order
    callbacks: list[str] = field(default_factory=list)  # --trainer.callbacks and its values, word by word

    @property
    def consent(self) -> Consent:
        """What the command line allows to run code."""
        return Consent(str(self.options.get("trust", False)).lower() == "true", tuple(self.callbacks))


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Returns the options of a command line; of one that is repeated, the last counts. Raises UsageError: a value is
    missing, or is one too many."""
    found, values, name = Arguments(), dict[str, list[str]](), ""
    for word in argv:
        is_option = re.match(r"--?[A-Za-z]", word) is not None
        if is_option:
            name, equals, value = word.lstrip("-").partition("=")
            if name == "h":
                name = "help"
        if name.startswith(CALLBACKS):
            found.callbacks.append(word)
        elif is_option:
            if name not in values or name != "config":
                values[name] = []
            if equals:
                values[name].append(value)
        elif name:
            values[name].append(word)
        else:
            raise UsageError(f"unexpected {word!r}: options begin with --, and --help lists them")
    if "config" in values:
        found.recipes = values.pop("config")
        if not found.recipes:
            raise UsageError("--config has no value: name a YAML recipe")
    found.options = {name: _value(name, given) for name, given in values.items() if name not in IGNORED}
    return found


def _value(name: str, given: list[str]) -> Any:
    """Returns the value of an option."""
    if name in LISTS and (len(given) != 1 or not given[0].startswith("[")):
        return given
    if not given and name in OPTIONAL:
        return OPTIONAL[name]
    if not given:
        raise UsageError(f"--{name} has no value")
    if len(given) > 1:
        raise UsageError(f"--{name} takes one value, not {len(given)}: put '{' '.join(given)}' in quotes")
    return given[0]
