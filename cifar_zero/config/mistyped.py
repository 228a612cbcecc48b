"""Refuses values of the wrong type, and says which type was expected."""

from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser

from cifar_zero.core.errors import UsageError


def refuse_mistyped(parser: ArgumentParser, options: Mapping[str, Any]) -> None:
    """Raises UsageError for the first value that does not have the type of its option. jsonargparse (4.53) names the
    option only in the text of its error, so each value is parsed alone."""
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if hint is not None and action.dest in options:
            check_type(f"--{action.dest}", options[action.dest], hint)


def check_type(flag: str, value: Any, hint: Any) -> None:
    """Raises UsageError unless jsonargparse can make the type `hint` of a value."""
    alone = ArgumentParser(exit_on_error=False)
    alone.add_argument("--value", type=hint)
    try:
        alone.parse_object({"value": value})
    except (ArgumentError, TypeError, ValueError) as error:
        raise UsageError(f"{flag}: expected {described(hint)}, not {value}") from error


def described(hint: Any) -> str:
    """Returns the name of a type for an error message, such as `int or one of ['auto']`."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return f"one of {[*inner]}"
    if kind in (Union, UnionType):
        return " or ".join(map(described, inner))
    if kind is list:
        return f"a list of {described(inner[0])}"
    if kind is tuple:
        return f"a list [{', '.join(map(described, inner))}]"
    return getattr(hint, "__name__", str(hint))
