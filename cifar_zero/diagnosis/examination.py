"""A check in a process of its own, so that it may hang or crash as it likes: the doctor goes on."""

import multiprocessing
import os
import signal
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from cifar_zero.diagnosis.finding import INSTALL, Finding, Options, failed

MESSAGE_CHARACTERS = 200
"""Most that is shown of a library's message."""

GRACE_SECONDS = 5.0
"""How long a check may take to end by itself after its time is up, or after Ctrl-C."""

_FORK = multiprocessing.get_context("fork")  # nothing is imported again, and the doctor has no threads and no torch


@dataclass(frozen=True)
class Check:
    """One question about this machine.

    Attributes:
        summary: what is looked at, for the help.
        answer: looks, in the check's own process; whatever it raises is a finding too.
        limit: seconds that it may take.
    """

    summary: str
    answer: Callable[[Options], Finding]
    limit: float = 60.0


class Examination:
    """A check under way. What it and its libraries print is dropped."""

    def __init__(self, check: Check, options: Options):
        self._limit = check.limit
        self._receiver, sender = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=_answer, args=(check, options, sender))
        self._process.start()
        sender.close()  # so that the end of the process is the end of the pipe

    def finding(self) -> Finding:
        """Waits for the answer; afterwards nothing that the check started is left."""
        try:
            if not self._receiver.poll(self._limit):
                return failed(f"no answer within {self._limit:g} s", "a disk or a driver hangs: look into dmesg")
            return self._receiver.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return failed(f"it crashed with {how}", INSTALL)
        finally:
            self._end(signal.SIGINT)  # so that a build takes its lock away
            self._process.join(GRACE_SECONDS)
            self._process.kill()
            self._end(signal.SIGKILL)
            self._process.join()

    def _end(self, request: signal.Signals) -> None:
        """Asks the check and what it started to end, if there is anything left."""
        assert self._process.pid is not None
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of those that have ended
            os.killpg(self._process.pid, request)


def _answer(check: Check, options: Options, sender: Connection) -> None:
    os.setsid()  # a group of its own, which ends with it
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    try:
        finding = check.answer(options)
    except ModuleNotFoundError as error:
        finding = failed(f"{error.name} is not installed", INSTALL)
    except Exception as error:
        finding = failed(f"{type(error).__name__}: {one_line(error)}", "mend what the error names")
    sender.send(finding)


def one_line(message: object) -> str:
    """A library's message, shortened."""
    return textwrap.shorten(str(message), MESSAGE_CHARACTERS, placeholder=" ...")
