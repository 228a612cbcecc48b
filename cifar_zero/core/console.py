"""What the sources tell the user, on the standard error: single lines, as they are."""

from __future__ import annotations

from rich.console import Console

_console = Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """Print one line, as it is: no markup, and no wrapping that would cut a path in two."""
    _console.print(message, markup=False, soft_wrap=True)
