"""Reads YAML and JSON as plain data: None, bool, numbers, str, and lists and mappings of these.

A file with the keys `class_path` or `init_args` is refused, because jsonargparse (4.53) imports the class or function
that the `class_path` of any mapping names.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from cifar_zero.core.errors import UsageError, short
from stepcheck.usage import nearest

Plain = bool | int | float | str | list | dict | None
"""The type of an option that accepts any plain data. For the type Any, jsonargparse would import the class or function
that a value names."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all control characters but tab and newline
NAMES_CODE = ("class_path", "init_args")  # keys that mark a class and its arguments for jsonargparse
MOST_VALUES, MOST_LEVELS = 100_000, 20
"""The largest allowed number of values in a file, and of nested levels. A recipe has far fewer of both."""


NUMBERS = {
    "int": r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$",
    "float": r"[-+]?(([0-9][0-9_]*)?\.[0-9_]+|[0-9][0-9_]*\.)(e[-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$",
}
"""The forms of numbers, in upper or lower case. Unlike in YAML 1.1, 1:30 is a text and not 90, and 010 is not 8."""


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads numbers as in NUMBERS. It refuses repeated keys, of which only the last value would
    count, and aliases, with which a few lines can stand for more values than memory holds, or for values that contain
    themselves."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, form) for tag, form in resolvers if not tag.endswith((":int", ":float"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(
                        f"line {key.start_mark.line + 1} sets {key.value} again: remove one of the two"
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} has the alias *{event.anchor}: repeat the value")
        return super().compose_node(parent, index)


for _kind, _form in NUMBERS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_form, re.IGNORECASE), [*"-+.0123456789"])


def load_value(text: str) -> Any:
    """Returns the value that a text on the command line stands for, such as a number or a list, or else the text."""
    try:
        value = load_yaml(text)
    except yaml.YAMLError:
        return text
    if value is None or isinstance(value, (bool, int, float, list, dict)):
        return value
    if re.fullmatch(r"[-+]?\d+e[-+]?\d+", text, re.IGNORECASE):  # a text in YAML 1.1
        return float(text)
    return text


def load_yaml(text: str) -> Any:
    """Returns the content of a YAML text. Raises yaml.YAMLError if the text is not YAML, has an alias, a repeated key,
    or an impossible number or date, or is nested too deeply."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("its lists or mappings are nested too deeply") from error
    except ValueError as error:  # an impossible number or date
        raise yaml.YAMLError(str(error)) from error


def read_yaml(file: Path, what: str) -> Any:
    """Returns the content of a YAML file as plain data. Raises UsageError if the file cannot be read, or if `load_yaml`
    or `check` refuses its content. The message begins with `what`, which describes the file."""
    return _parsed(read_text(file, what), what, load_yaml, "YAML")


def read_json(file: Path, what: str) -> Any:
    """Like `read_yaml`, for a JSON file. A repeated key is refused too."""
    return parse_json(read_text(file, what), what)


def parse_json(text: str, what: str) -> Any:
    """Like `read_json`, for a text that was read from the file."""
    return _parsed(text, what, partial(json.loads, object_pairs_hook=_without_repeats), "JSON")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it sets {key} twice: remove one of the two")
        found[key] = value
    return found


def read_text(file: Path, what: str) -> str:
    """Returns the content of a text file. Raises UsageError if it cannot be read or is not text. The message begins
    with `what`."""
    try:
        return file.read_text()
    except OSError as error:
        similar = nearest(str(file), map(str, file.parent.glob(f"*{file.suffix}")), cutoff=0.8, otherwise="no")
        meant = f"; {similar}" if isinstance(error, FileNotFoundError) and similar != "no" else ""
        raise UsageError(f"{what} cannot be read: {error.strerror}{meant}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not a text file") from error


def _parsed(text: str, what: str, load: Callable[[str], Any], language: str) -> Any:
    try:
        tree = load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{what} is not {language}: {short(error)}") from error
    check(tree, what)
    return tree


def check(tree: Any, what: str) -> None:
    """Raises UsageError unless `tree`, the content of a file, is plain data within MOST_VALUES and MOST_LEVELS. Refuses
    control characters except tabs and line breaks. Refuses the keys `class_path` and `init_args`, also as part of a
    dotted key, with which jsonargparse imports code. A string is checked as the YAML value that jsonargparse would
    read. The message begins with `what`, which describes the file."""
    left, seen = [("", tree, 0)], 0
    while left:
        name, value, level = left.pop()
        seen += 1
        if seen > MOST_VALUES or level > MOST_LEVELS:
            raise UsageError(f"{what} has more than {MOST_VALUES:,} values, or more than {MOST_LEVELS} nested levels")
        if CONTROL.search(f"{name} {value}" if isinstance(value, str) else name):
            raise UsageError(
                f"{what}: {name or 'it'} has control characters, which could change a terminal: remove them"
            )
        if isinstance(value, str):
            try:
                value = load_yaml(value)
            except yaml.YAMLError as error:
                if "&" in value and "*" in value:
                    raise UsageError(f"{what}: {name} contains an alias: write the values out") from error
            if not isinstance(value, (list, dict)):
                continue
        if isinstance(value, dict):
            for key in value:
                for word in str(key).split("."):  # jsonargparse divides dotted keys
                    if word in NAMES_CODE:
                        where = name or key
                        raise UsageError(f"{what}: {where} has {word}, which names code: give it on the command line")
            left += [(f"{name}.{key}".lstrip("."), inner, level + 1) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            left += [(name, inner, level + 1) for inner in value]
        elif value is not None and not isinstance(value, (bool, int, float)):
            raise UsageError(f"{what}: {name} is a {type(value).__name__}: write a number, a text, a list or a mapping")


def is_plain(kind: Any) -> bool:
    """Returns whether all values of a type are plain data, so that jsonargparse imports nothing for them."""
    if get_origin(kind) in (Union, UnionType, list, tuple, dict):
        return all(map(is_plain, get_args(kind)))
    return get_origin(kind) is Literal or kind in (bool, int, float, str, list, tuple, dict, None, NoneType, ...)
