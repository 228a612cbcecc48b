"""Warns of other programs on the cores of a run."""

import os
import time
from contextlib import suppress
from typing import NamedTuple

import psutil

from cifar_zero.core.console import say
from cifar_zero.core.hardware import cores
from cifar_zero.launch import rank_environment


class Usage(NamedTuple):
    """The use of the cores on which this run's processes may run, up to now, in seconds."""

    clock: float
    cores: int  # 0 if the system does not tell, or a process of this run ends just now
    busy: float  # by all programs, summed over the cores; those of lower priority (nice) give way and do not count
    own: float  # by this run's processes on this computer


def usage() -> Usage:
    """Returns the usage so far, for `warn`; takes milliseconds."""
    run = psutil.Process()
    if rank_environment.is_rank():
        run = run.parent() or run  # the launcher of all ranks on this computer
    with suppress(psutil.Error, OSError):
        numbers = cores(run.pid)
        times = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in numbers]
        nice = os.nice(0) > 0  # then the own time is in that of nice programs
        busy = sum(core.user + core.system + core.nice * nice for core in times)
        processes = [run, *run.children(recursive=True)]
        own = sum(sum(process.cpu_times()[:4]) for process in processes)  # with those of ended children
        return Usage(time.monotonic(), len(times), busy, own)
    return Usage(time.monotonic(), 0, 0.0, 0.0)


def warn(before: Usage, now: Usage) -> None:
    """Prints a line if other programs have used more than half of the cores between two calls of `usage`."""
    seconds = now.clock - before.clock
    if seconds < 1 or not before.cores or not now.cores:  # less tells little: a program that is just ending looks busy
        return
    others = (now.busy - before.busy - (now.own - before.own)) / seconds
    if others > now.cores / 2:
        say(f"other programs use {others:.1f} of the {now.cores} cores: steps will be slower")
