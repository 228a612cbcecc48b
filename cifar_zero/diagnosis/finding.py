"""What a check is asked and what it answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

INSTALL = "pip install -r requirements.txt"
"""Mends what is wrong with a package."""

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Options:
    """What the user asks about.

    Attributes:
        ranks: processes of a run on this machine.
        out: directory under which runs are kept.
        data_root: directory of the dataset.
        data_cache: directory of the decoded images; empty: <data_root>/.cifar-zero.
        build: whether DeepSpeed's operators are built where they are not yet.
        timeout: seconds without any answer after which a rank is given up.
        requirements: requirements.txt, whose versions everything was tried with.
    """

    ranks: int
    out: str
    data_root: str
    data_cache: str
    build: bool
    timeout: float
    requirements: Path


@dataclass(frozen=True)
class Finding:
    """The answer of a check.

    Attributes:
        status: ok; warning: something here does not work, or will be slow; failed: runs will not work.
        found: what is there, in half a sentence.
        mend: what to do, a command where there is one; empty where all is well.
    """

    status: Status
    found: str
    mend: str = ""


def ok(found: str) -> Finding:
    """All is well."""
    return Finding("ok", found)


def warning(found: str, mend: str) -> Finding:
    """Some runs will be slow or will not work."""
    return Finding("warning", found, mend)


def failed(found: str, mend: str) -> Finding:
    """Runs will not work."""
    return Finding("failed", found, mend)
