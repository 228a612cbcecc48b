"""What other programs took of the processor while something was measured: figures of a busy machine mislead."""

from __future__ import annotations

import resource
import time

import psutil


class Others:
    """Counts from when it is made; the runs' processes must have been waited for."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def share(self) -> float:
        """Of the time of all cores, from 0 to 1; what a hypervisor gave to other machines is in it."""
        theirs = (_busy_seconds() - self._busy) - (_own_seconds() - self._own)
        return max(0.0, theirs / (time.perf_counter() - self._started) / (psutil.cpu_count() or 1))


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    counted_twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - counted_twice - times.idle - getattr(times, "iowait", 0.0)


def _own_seconds() -> float:
    """Processor time of this process and of all its processes that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
