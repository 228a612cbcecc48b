"""A check of the doctor: what it is asked, and what it answers."""

from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Literal

from cifar_zero.core.errors import short

INSTALL = "pip install -r requirements.txt"  # fixes a missing or broken package


@dataclass(frozen=True)
class Options:
    """What the user asks about."""

    ranks: int  # processes of a run on this machine
    out: str  # directory for run folders
    data_root: str  # directory of the dataset
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


def answer(check: Callable[[Options], Finding], options: Options) -> Finding:
    """Returns the finding of a check, whose output is dropped; an exception is a finding too."""
    try:
        with redirect_stdout(StringIO()):
            return check(options)
    except ModuleNotFoundError as error:
        return failed(f"{error.name} is not installed", INSTALL)
    except Exception as error:
        return failed(f"{type(error).__name__}: {short(error)}", "fix what the error names")
