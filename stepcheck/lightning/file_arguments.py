"""Decides what a file may give to the arguments of a user's class: only plain data.

jsonargparse (4.53) imports what a value names wherever the type of an argument is, or contains, a class or a function,
or accepts anything. A value from a file therefore reaches jsonargparse only if it sets one whole argument, and if the
type of this argument leaves nothing to import. Classes and functions are named on the command line.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import reduce
from operator import or_
from types import GenericAlias, UnionType
from typing import Any, Union, get_args, get_origin

from jsonargparse import ArgumentParser
from jsonargparse._paths import Path
from jsonargparse._typehints import ActionTypeHint, accepts_any_value
from yaml import YAMLError

from stepcheck.lightning import plain_data
from stepcheck.lightning.plain_data import Plain, is_plain, load_yaml
from stepcheck.usage import UsageError

Tree = dict[str, Any]
"""Plain data, by key or by option."""

Leaves = Mapping[str, ActionTypeHint]
"""The arguments of a class, by option. The fields of an argument that is a dataclass replace this argument."""


def leaves_of(parser: ArgumentParser) -> Leaves:
    """Returns the arguments to which a file may give values."""
    return {action.dest: action for action in parser._actions if isinstance(action, ActionTypeHint)}


def options_in(tree: Tree, section: str, leaves: Leaves) -> Tree:
    """Returns the values that a section of a file gives, by option. The values are not checked."""
    found: Tree = {}
    for key, value in tree.items():
        option = f"{section}.{key}"
        has_fields = option not in leaves and any(leaf.startswith(f"{option}.") for leaf in leaves)
        if has_fields and isinstance(value, dict):
            found |= options_in(value, option, leaves)
        else:
            found[option] = value
    return found


def check(given: Tree, leaves: Leaves, what: str) -> None:
    """Raises UsageError unless jsonargparse can parse the values from a file without importing anything. Types that
    accept anything are narrowed to plain data, so that they can be parsed.

    Args:
        given: The values, by option.
        leaves: The arguments of the class.
        what: Describes the file.
    """
    plain_data.check(given, what)
    for option, value in given.items():
        if option not in leaves:
            raise UsageError(f"{what}: {option} must be a mapping of its arguments, without dots")
        kind = leaves[option]._typehint = _without_any(leaves[option]._typehint)
        if not _imports_nothing(value, kind):
            raise UsageError(f"--{option} in a file may not name code: give it on the command line")


def refuse_files(given: Mapping[str, str], leaves: Leaves) -> None:
    """Raises UsageError if an option of the command line names a file that jsonargparse might read as a configuration,
    because the file could name code."""
    for option, value in given.items():
        if option in leaves and is_plain(leaves[option]._typehint):
            continue
        tree: Any = value
        with suppress(YAMLError):
            tree = load_yaml(value)
        for text in (value, *plain_data.texts(tree)):
            if _is_file(text):
                raise UsageError(f"--{option}: the file {text} could name code: give the values that it contains")


def _imports_nothing(value: Any, kind: Any) -> bool:
    """Returns whether jsonargparse imports nothing when it parses a value, which `plain_data.check` has accepted, as a
    `kind`. A number names no code. A text, list or mapping names no code if the type is plain."""
    if is_plain(kind) or value is None or isinstance(value, (bool, int, float)):
        return True
    if get_origin(kind) in (Union, UnionType):  # jsonargparse tries every member
        return all(_imports_nothing(value, member) for member in get_args(kind))
    if get_origin(kind) is list and isinstance(value, list):
        return all(_imports_nothing(inner, get_args(kind)[0]) for inner in value)
    if is_dataclass(kind) and isinstance(value, dict):
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(kind, "fields", fail_untyped=False)  # type: ignore[arg-type]
        leaves = leaves_of(parser)
        given = options_in(value, "fields", leaves)
        return all(option in leaves and _imports_nothing(given[option], leaves[option]._typehint) for option in given)
    return False


def _without_any(kind: Any) -> Any:
    """Returns a type in which `Plain` replaces each type that accepts anything."""
    origin: Any = get_origin(kind)
    members = get_args(kind)
    if accepts_any_value(kind):
        return Plain
    if origin in (Union, UnionType):
        return reduce(or_, map(_without_any, members))
    if origin in (list, tuple, dict):
        return GenericAlias(origin, tuple(map(_without_any, members)))
    return kind


def _is_file(text: str) -> bool:
    try:
        Path(text, mode="fr")
    except TypeError:
        return False
    return True
