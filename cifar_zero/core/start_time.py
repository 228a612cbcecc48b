"""When the command was given: start-up is timed from there, in the launcher's ranks too; no torch."""

from __future__ import annotations

import os
import time

import psutil

VARIABLE = "CIFAR_ZERO_STARTED"
"""Environment variable, in seconds since 1970: ranks inherit it from their launcher, measured runs from a benchmark."""


def note() -> None:
    """Takes now for the start, unless the process that started this one has noted an earlier one."""
    os.environ.setdefault(VARIABLE, str(time.time()))


def command_given() -> float:
    """In seconds since 1970; where nobody has noted it, the start of this process."""
    return float(os.environ.get(VARIABLE) or psutil.Process().create_time())
