"""Prints single lines for the user on the standard error."""

from rich.console import Console

_console = Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """Prints one line without markup, and without wrapping that would cut a path in two."""
    _console.print(message, markup=False, soft_wrap=True)
