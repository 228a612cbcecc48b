"""How the programs end: one clear line and an exit code; a traceback only with --debug."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from cifar_zero.core import interrupt, user_code
from cifar_zero.core.errors import RunError, Stopped, UsageError, short
from cifar_zero.core.known_failures import explain


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, with the option --debug; shows its help as it is written."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(f"{message} (--help lists all options)")


def guarded(main: Callable[[], int]) -> int:
    """Runs a program's `main` and returns its exit code: 2 for a user's mistake, 1 for a failure while running."""
    interrupt.expected = True
    try:
        return main()
    except Stopped as stop:
        interrupt.ignore()  # the libraries' exit takes a moment
        print(f"{stop.name}: {stop}" if str(stop) else f"stopped by {stop.name}", file=sys.stderr)
        return stop.exit_code
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        expected = isinstance(error, (UsageError, RunError))
        print(f"error: {error if expected else explain(error) or _unexplained(error)}", file=sys.stderr)
        return error.exit_code if expected else 1
    finally:
        interrupt.expected = False


def _unexplained(error: Exception) -> str:
    """Returns the system's words for an OSError, else the library's message, shortened."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    return f"{user_code.where(error)}{type(error).__name__}: {short(error, 300)} (--debug shows where)"
