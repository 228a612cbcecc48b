"""The time at which the command was given, in the launcher's ranks too; start-up is measured from it. No torch."""

import os
import time

import psutil

VARIABLE = "CIFAR_ZERO_STARTED"
"""Environment variable, in seconds since 1970; ranks inherit it from their launcher, measured runs from a benchmark."""


def note() -> None:
    """Notes the current time as the start, unless a parent process has noted an earlier one."""
    os.environ.setdefault(VARIABLE, str(time.time()))


def command_given() -> float:
    """Returns the start in seconds since 1970: the noted one, else this process's."""
    return float(os.environ.get(VARIABLE) or psutil.Process().create_time())
