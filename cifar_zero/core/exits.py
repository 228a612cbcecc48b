"""Starts and ends the programs of this package. An error prints one line, and with --debug a traceback, and sets the
exit code."""

import argparse
import atexit
import errno
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TextIO

from cifar_zero.core.console import say
from cifar_zero.core.errors import FaultFound, RunError, Stopped, UsageError, explain, short
from stepcheck.lightning import user_code

EXTRAS = ("onnx", "onnxruntime", "onnxscript")  # packages that only the command export needs

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a program. SIGTERM comes from a cluster or container, and SIGHUP from a closed terminal."""

SLURM_REQUEUE = signal.SIGUSR1  # sent by `sbatch --signal=USR1@120` before the time limit

# Codes of errors that a wrong path causes.
PATH_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EROFS, errno.ELOOP)
PATH_ERRORS += (errno.ENAMETOOLONG, errno.ENOTEMPTY)

STARTED = "CIFAR_ZERO_STARTED"
"""Environment variable with the time when the command was given, in seconds since 1970. Ranks inherit it from their
launcher, and the runs of a benchmark from the benchmark."""

RANKS = ("RANK", "SLURM_PROCID")  # environment variables in which launchers give a process its rank

FALSE = ("false", "no", "off")  # values of a flag, as in YAML, whose package is imported after this module

WITH_EXIT_CODE = (UsageError, RunError, FaultFound)  # their message is the line to print

_guarded = False  # whether `guarded` is running and catches Stopped


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError, has the option --debug, and keeps the line breaks of help texts."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists all options)")


class Unfailing(io.FileIO):
    """A file that drops what it cannot write, for example a log on a full disk. A lost message must not end a
    training."""

    def write(self, content: Any) -> int | None:
        try:
            return super().write(content)
        except OSError:
            return len(content)


def install() -> None:
    """Makes Ctrl-C, SIGTERM and SIGHUP print one line and exit with the code 128 + the number of the signal. Call it
    before slow imports.

    A signal that the process ignores stays ignored, such as Ctrl-C in a background job and SIGHUP under nohup. A Ctrl-C
    that `local_launcher.prepare` has blocked is delivered now. Also records the start time in the environment
    (STARTED), unless a parent process has.
    """
    os.environ.setdefault(STARTED, str(time.time()))
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def requests() -> list[signal.Signals]:
    """Returns the signals that ask a training to stop: SIGNALS, and in a SLURM job SLURM_REQUEUE, except those that
    this process ignores, as it does under nohup."""
    numbers = [*SIGNALS]
    if "SLURM_JOB_ID" in os.environ:
        numbers.append(SLURM_REQUEUE)
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def ignore() -> None:
    """Ignores SIGNALS from now on, because the program is already ending."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def interrupt(number: int, frame: object) -> None:
    """Handles a signal. Raises Stopped if `guarded` can catch it. Otherwise prints a line and ends the process at once.
    This also happens while a module is being imported, because in a callback of the import system Python would print
    the exception and continue."""
    stop = Stopped(number)
    caller = sys._getframe()
    while caller is not None and not caller.f_code.co_filename.startswith("<frozen importlib"):
        caller = caller.f_back
    if _guarded and caller is None:
        raise stop
    with suppress(OSError):  # the terminal is closed, or the disk of a log is full
        os.write(2, f"stopped by {stop.name}\n".encode())
    os._exit(stop.exit_code)


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a program's `main` and ends the process with the exit code of `guarded`. If this is 0 but standard output
    could not be written, the exit code is 1. Messages on standard error that cannot be written are dropped. Only rank 0
    prints results, so on other ranks the same goes for standard output.

    If an error has left a process group of torch open, the process ends without the destructors of its libraries. With
    gloo, the destructors of torch 2.15 abort about one such process in ten (exit code 134). Destroying the group
    instead could hang, because other ranks may wait in a collective.
    """
    _open_streams()
    if sys.stderr is sys.__stderr__:  # otherwise it is no file, as in a notebook
        sys.stderr = _unfailing(sys.stderr)
    if sys.stdout is sys.__stdout__ and any(os.environ.get(name, "0") != "0" for name in RANKS):
        sys.stdout = _unfailing(sys.stdout)
    code = guarded(main)
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more, and ends with 120
        if not isinstance(error, BrokenPipeError):  # as after `| head`
            say(f"error: standard output could not be written: {error.strerror}")
        code = code or RunError.exit_code
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _open_streams() -> None:
    """Opens os.devnull for each standard stream that the parent process has closed, as `>&-` does. Otherwise the stream
    is None in Python, and the next file that is opened gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))


def _unfailing(stream: TextIO) -> TextIO:
    raw = Unfailing(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=True)


def guarded(main: Callable[[], int]) -> int:
    """Runs a program's `main` and returns its exit code, or, if `main` raises an exception, 2 for a user's mistake, 3
    for a fault that a step check has found, 1 for any other failure, and 128 + the number of the signal if a signal
    stopped the program. Prints the exception in one line, followed by its notes, or its traceback with --debug.
    SystemExit, as after --help, is not caught."""
    global _guarded
    _guarded = True
    try:
        return main()
    except Stopped as stop:
        ignore()  # the libraries take a moment to shut down
        say(f"{stop.name}: {stop}" if str(stop) else f"stopped by {stop.name}")
        return stop.exit_code
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        error = _mistake(error) or error
        if wants_traceback():
            traceback.print_exc()
        elif isinstance(error, WITH_EXIT_CODE):
            say(f"error: {error}")
        else:
            say(f"error: {explain(error) or _unexplained(error)}")
        for note in notes if not wants_traceback() else []:
            say(note)
        return error.exit_code if isinstance(error, WITH_EXIT_CODE) else RunError.exit_code
    finally:
        _guarded = False


def _mistake(error: Exception) -> UsageError | None:
    """Returns the mistake of the user that caused an error, or None. A mistake is a missing package of EXTRAS, or a
    refused path: one on the command line, a path inside it, or a folder that contains it."""
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return UsageError(f"this command needs a package: pip install {error.name}")
    if not isinstance(error, OSError) or error.errno not in PATH_ERRORS or not isinstance(error.filename, str):
        return None
    refused = Path(error.filename).absolute()
    for before, word in pairwise(["", *sys.argv[1:]]):
        flag, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
        named = Path(value).absolute()
        is_inside = named in refused.parents or (os.sep in value and refused in named.parents)
        if value and (named == refused or is_inside):
            of = f"{flag} {value}" if flag.startswith("--") else value
            return UsageError(f"{of}: {error.strerror} ({error.filename})")
    return None


def wants_traceback() -> bool:
    """Returns whether this process's command line has --debug, unless its value is in FALSE."""
    for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        option, _, value = word.partition("=")
        if option == "--debug":
            return (value or following).lower() not in FALSE
    return False


def _unexplained(error: Exception) -> str:
    """Returns the line to print for an error that `explain` does not recognise: for an OSError the system's message
    with the file, otherwise the type and the shortened message, after the place in the user's code that failed, if
    any."""
    if isinstance(error, OSError):
        if error.filename:
            return f"{error.strerror or error} ({error.filename})"
        return error.strerror or str(error)
    return f"{user_code.where(error)}{type(error).__name__}: {short(error, 300)} (--debug shows where)"
