"""Splits a command line into the names and untyped values of its options. A value is a string, a list of strings or,
for an option without a value and for SWITCHES, a bool. Other types come later, from the fields of Recipe, Placement and
Output."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from cifar_zero.config.settings import OWNERS, Consent, Settings, canonical, flat
from cifar_zero.core.errors import UsageError
from cifar_zero.core.plain_data import load_value

SWITCHES = {"trust", "debug", "print_config"}
"""Options that are not fields of Recipe, Placement or Output, and are true or false."""

NEED_NO_VALUE = {"help"} | SWITCHES
NEED_NO_VALUE |= {option.name for part in OWNERS.values() for option in fields(part) if option.default is False}
"""Options whose value is true if the command line gives none."""

LISTS = {option for option, default in flat(Settings()).items() if isinstance(default, list)}

CALLBACKS = "trainer.callbacks"  # the only option that names classes; jsonargparse gets it unchanged


@dataclass
class Arguments:
    """The options of a command line, before they have types."""

    options: dict[str, Any] = field(default_factory=dict)  # value by option: a string, a list of strings, or a bool
    recipes: list[str] = field(default_factory=list)  # the files of --config, in their order
    callbacks: list[str] = field(default_factory=list)  # --trainer.callbacks and its values, word by word

    @property
    def consent(self) -> Consent:
        """The user's consent to run code, as given by --trust and --trainer.callbacks."""
        return Consent(self.options.get("trust", False), tuple(self.callbacks))


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Returns the options of a command line. If an option is repeated, its last value counts, but each --config adds a
    file. Raises UsageError if an option has no value or more values than it takes, or if the command line does not
    begin with an option."""
    arguments, values, name = Arguments(), dict[str, list[str]](), ""
    for word in argv:
        is_option = re.match(r"--?[A-Za-z]", word) is not None
        if is_option:
            name, equals, value = word.lstrip("-").partition("=")
            name = "help" if name == "h" else canonical(name)
        if name.startswith(CALLBACKS):
            arguments.callbacks.append(word)
        elif is_option:
            if name not in values or name != "config":
                values[name] = []
            if equals:
                values[name].append(value)
        elif name:
            values[name].append(word)
        else:
            raise UsageError(f"unexpected {word!r}: options begin with --, and --help lists them")
    values.pop("local_rank", None)  # given by DeepSpeed's launcher, which sets LOCAL_RANK too
    if "config" in values:
        arguments.recipes = values.pop("config")
        if not arguments.recipes:
            raise UsageError("--config has no value: name a YAML recipe")
    arguments.options = {name: _value(name, words) for name, words in values.items()}
    return arguments


def _value(name: str, words: list[str]) -> Any:
    if not words and name in NEED_NO_VALUE:
        return True
    if not words:
        raise UsageError(f"--{name} has no value")
    if name in LISTS and (len(words) > 1 or not words[0].startswith("[")):
        return words
    if len(words) > 1:
        raise UsageError(f"--{name} takes one value, not {len(words)}: put '{' '.join(words)}' in quotes")
    if name not in SWITCHES:
        return words[0]
    value = load_value(words[0])
    if not isinstance(value, bool):
        raise UsageError(f"--{name}: expected bool, not {words[0]}")
    return value
