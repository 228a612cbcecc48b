"""How the programs end in front of a user: one clear line and an exit code, the traceback only for --debug."""

from __future__ import annotations

import argparse
import signal
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from cifar_zero.core.errors import RunError, Stopped, UsageError
from cifar_zero.core.known_failures import explain

MESSAGE_CHARACTERS = 300
"""Most that is shown of a library's message."""

CTRL_C = 128 + signal.SIGINT
"""Exit code of a program that Ctrl-C ended, as shells have it."""


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line as everywhere here; with the option that `guarded` heeds."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(f"{message} (--help lists all options)")


def stop_at_signals() -> None:
    """From now on SIGTERM and SIGHUP raise Stopped, as Ctrl-C raises KeyboardInterrupt."""

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)


def guarded(main: Callable[[], int]) -> int:
    """Runs a program's `main` and returns its exit code: 2 for the user's mistakes, 1 for what failed while running."""
    try:
        return main()
    except (UsageError, RunError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Stopped as stop:
        print(": ".join(filter(None, [f"stopped by {stop.name}", str(stop)])), file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return CTRL_C
    except SystemExit as stop:
        if not isinstance(stop.__context__, KeyboardInterrupt):  # Lightning makes a plain exit of a second Ctrl-C
            raise
        print("stopped by Ctrl-C", file=sys.stderr)
        return CTRL_C
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        print(f"error: {explain(error) or _unexplained(error)}", file=sys.stderr)
        return 1


def _unexplained(error: Exception) -> str:
    """The system's own words for what it refused, else the library's message, cut short."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    text = textwrap.shorten(str(error), MESSAGE_CHARACTERS, placeholder=" ...")
    return f"{type(error).__name__}: {text} (--debug shows where)"
