"""A check of the doctor: what it is asked, what it answers, and its process, in which it may hang or crash."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Literal

from cifar_zero.core.errors import short

INSTALL = "pip install -r requirements.txt"  # fixes a missing or broken package

_FORK = multiprocessing.get_context("fork")  # nothing is imported again, and the doctor has no threads and no torch


@dataclass(frozen=True)
class Options:
    """What the user asks about."""

    ranks: int  # processes of a run on this machine
    out: str  # directory for run folders
    data_root: str  # directory of the dataset
    data_cache: str  # directory of the decoded images; empty: <data_root>/.cifar-zero
    build: bool  # build the DeepSpeed operators that are missing
    timeout: float  # limit, in seconds, of each step in which a rank waits for the others


@dataclass(frozen=True)
class Finding:
    """The answer of a check; warning: some runs are not possible, or will be slow; failed: no run will work."""

    status: Literal["ok", "warning", "failed"]
    found: str  # half a sentence
    fix: str = ""  # what to do, as a command if there is one; empty if nothing is wrong


ok = partial(Finding, "ok")
warning = partial(Finding, "warning")
failed = partial(Finding, "failed")


@dataclass(frozen=True)
class Check:
    """One question about this machine."""

    summary: str  # what is checked, for --help
    answer: Callable[[Options], Finding]  # runs in its own process; an exception becomes a finding too
    limit: float = 60.0  # in seconds


def examine(check: Check, options: Options) -> Finding:
    """Returns the finding of a check, whose output is dropped; no process that it started is left behind."""
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_answer, args=(check, options, sender))
    process.start()
    sender.close()  # so that the pipe ends when the process ends
    try:
        if not receiver.poll(check.limit):
            return failed(f"no answer within {check.limit:g} s", "a disk or a driver may hang: look into dmesg")
        return receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return failed(f"the check crashed with {how}", INSTALL)
    finally:
        process.kill()
        assert process.pid is not None
        with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for processes that have ended
            os.killpg(process.pid, signal.SIGKILL)  # its own group: what it has started
        process.join()


def _answer(check: Check, options: Options, sender: Connection) -> None:
    os.setsid()  # a separate process group, which `examine` ends
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    try:
        finding = check.answer(options)
    except ModuleNotFoundError as error:
        finding = failed(f"{error.name} is not installed", INSTALL)
    except Exception as error:
        finding = failed(f"{type(error).__name__}: {short(error)}", "fix what the error names")
    sender.send(finding)
