"""Warns of other programs on the cores of a run; no torch."""

import os
import time
from contextlib import suppress
from typing import NamedTuple

import psutil

from cifar_zero.core.console import say
from cifar_zero.launch import rank_environment

LEAST_SECONDS = 1.0  # a shorter time tells little: a program that is just ending looks busy


class Usage(NamedTuple):
    """The use of the cores on which this run's processes may run, up to now, in seconds."""

    clock: float
    cores: int
    busy: float  # by all programs, summed over the cores; those of lower priority (nice) give way and do not count
    own: float  # by this run's processes on this computer


def usage() -> Usage:
    """Returns the usage so far, for `warn`, in milliseconds; `cores` is 0 if the system does not tell."""
    run = psutil.Process()
    if rank_environment.is_rank():
        run = run.parent() or run  # the launcher of all ranks on this computer
    with suppress(psutil.Error, OSError):
        numbers = os.sched_getaffinity(run.pid) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        times = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in numbers]
        nice = os.nice(0) > 0  # then the own time is in that of nice programs
        busy = sum(core.user + core.system + core.nice * nice for core in times)
        own = sum(map(_seconds, [run, *run.children(recursive=True)]))
        return Usage(time.monotonic(), len(times), busy, own)
    return Usage(time.monotonic(), 0, 0.0, 0.0)


def warn(before: Usage, now: Usage) -> None:
    """Prints a line if other programs have used more than half of the cores between two calls of `usage`."""
    seconds = now.clock - before.clock
    if seconds < LEAST_SECONDS or not before.cores:
        return
    others = (now.busy - before.busy - (now.own - before.own)) / seconds
    if others > now.cores / 2:
        say(f"other programs use {others:.1f} of the {now.cores} cores: steps will be slower")


def _seconds(process: psutil.Process) -> float:
    """Returns the processor time of a process and of its ended children; 0 if it has ended."""
    with suppress(psutil.Error):
        return sum(process.cpu_times()[:4])
    return 0.0
