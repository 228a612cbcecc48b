"""What a check is asked and what it answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

INSTALL = "pip install -r requirements.txt"
"""Fixes a missing or broken package."""

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Options:
    """What the user asks about.

    Attributes:
        ranks: processes of a run on this machine.
        out: directory for run folders.
        data_root: directory of the dataset.
        data_cache: directory of the decoded images; empty: <data_root>/.cifar-zero.
        build: whether to build the DeepSpeed operators that are missing.
        timeout: time limit, in seconds, of each step in which a rank waits for the others.
        requirements: path of requirements.txt, which has the tested versions.
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
        status: ok; warning: some runs are not possible, or will be slow; failed: no run will work.
        found: what was found, in half a sentence.
        fix: what to do, as a command if there is one; empty if nothing is wrong.
    """

    status: Status
    found: str
    fix: str = ""


def ok(found: str) -> Finding:
    """Returns a finding: nothing is wrong."""
    return Finding("ok", found)


def warning(found: str, fix: str) -> Finding:
    """Returns a finding: some runs are not possible, or will be slow."""
    return Finding("warning", found, fix)


def failed(found: str, fix: str) -> Finding:
    """Returns a finding: no run will work."""
    return Finding("failed", found, fix)
