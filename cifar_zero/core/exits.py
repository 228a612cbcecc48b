"""How the programs start and end: one clear line and an exit code; a traceback only with --debug."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from cifar_zero.core import user_code
from cifar_zero.core.errors import RunError, Stopped, UsageError, explain, short

EXTRAS = ("optuna", "onnx", "onnxruntime", "onnxscript")  # packages that only cifar-zero sweep and export need

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a program: Ctrl-C, a cluster or container, a closed terminal."""

STARTED = "CIFAR_ZERO_STARTED"
"""Environment variable: when the command was given, in seconds since 1970. Ranks inherit it from their launcher,
measured runs from a benchmark."""

_guarded = False  # whether `guarded` is there to catch Stopped


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, with the option --debug; shows its help as it is written."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(f"{message} (--help lists all options)")


def install() -> None:
    """Makes Ctrl-C, SIGTERM and SIGHUP one line and exit code 128 + the signal's number; called before slow imports.
    A process that ignores one of them continues to: a background job ignores Ctrl-C, and nohup SIGHUP. A Ctrl-C that
    `local_launcher.prepare` has held back arrives now. Notes the time of the start, unless a parent process has."""
    os.environ.setdefault(STARTED, str(time.time()))
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def ignore() -> None:
    """Ignores the signals from now on, because the program already ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def interrupt(number: int, frame: object) -> None:
    """Raises Stopped, or ends the process if that could get lost: Python prints what is raised in a callback of the
    import system and continues."""
    stop = Stopped(number)
    caller = sys._getframe()
    while caller is not None and not caller.f_code.co_filename.startswith("<frozen importlib"):
        caller = caller.f_back
    if _guarded and caller is None:
        raise stop
    os.write(2, f"stopped by {stop.name}\n".encode())
    os._exit(stop.exit_code)


def guarded(main: Callable[[], int]) -> int:
    """Runs a program's `main` and returns its exit code: 2 for a user's mistake, 1 for a failure while running."""
    global _guarded
    _guarded = True
    try:
        return main()
    except Stopped as stop:
        ignore()  # the libraries' exit takes a moment
        print(f"{stop.name}: {stop}" if str(stop) else f"stopped by {stop.name}", file=sys.stderr)
        return stop.exit_code
    except (UsageError, RunError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        print(f"error: {explain(error) or _unexplained(error)}", file=sys.stderr)
        return RunError.exit_code
    finally:
        _guarded = False


def _unexplained(error: Exception) -> str:
    """Returns the system's words for an OSError, else the library's message, shortened."""
    if isinstance(error, OSError):
        if error.filename:
            return f"{error.strerror or error} ({error.filename})"
        return error.strerror or str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"the package {error.name} is not installed: pip install {error.name}"
    return f"{user_code.where(error)}{type(error).__name__}: {short(error, 300)} (--debug shows where)"
