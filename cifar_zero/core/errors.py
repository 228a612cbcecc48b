"""The ways in which a run can end early, each with one line and one exit code."""

import signal
import textwrap


class UsageError(Exception):
    """The command line, the configuration or its data is wrong; the message says in one line what and how to fix it."""

    exit_code = 2


class RunError(Exception):
    """The run failed (network, disk, a dead rank); the message says in one line what happened and how to fix it."""

    exit_code = 1


class Stopped(BaseException):
    """The user or the cluster stopped the run; the message says in one line how to resume it. The exit code is a
    shell's, 128 + the number of the signal. It is not an Exception, which libraries catch and continue after."""

    def __init__(self, number: int, message: str = ""):
        super().__init__(message)
        self.number = number
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.exit_code = 128 + number


def short(message: object, characters: int = 120) -> str:
    """Returns the message of a library's error as one shortened line."""
    return textwrap.shorten(str(message), characters, placeholder=" ...")
