"""Defines the results of the checks of cifar-zero doctor, which checks a machine or the nodes of a cluster."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from cifar_zero.core.errors import short

INSTALL = "pip install -r requirements.txt"  # fixes a missing or broken package


@dataclass(frozen=True)
class Finding:
    """The result of a check. After `warning` some runs are impossible or slow, and after `failed` no run will work."""

    status: Literal["ok", "warning", "failed"]
    summary: str  # half a sentence
    fix: str = ""  # what to do, as a command if there is one; empty if nothing is wrong
    bugs: Sequence[str] = ()  # known bugs of a package's release, each in one line


ok = partial(Finding, "ok")
warning = partial(Finding, "warning")
failed = partial(Finding, "failed")


def existing(folder: Path) -> Path:
    """Returns the folder if it exists, or else its nearest parent that exists, relative if `folder` is relative."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def answer(check: Callable[[Namespace], Finding], options: Namespace) -> Finding:
    """Returns the finding of a check. An exception in the check becomes a finding with the status `failed`."""
    try:
        return check(options)
    except ModuleNotFoundError as error:
        return failed(f"{error.name} is not installed", INSTALL)
    except Exception as error:
        return failed(f"{type(error).__name__}: {short(error)}", "fix what the error names")
