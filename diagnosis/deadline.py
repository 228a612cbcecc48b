"""Ends a rank that waits for another one for too long, whatever it waits in."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

POLL_SECONDS = 0.2


class Deadline:
    """A thread that ends this process with one line and exit code 1 when no step has begun for so many seconds.

    A thread, since a rank may hang in what heeds no limit: NCCL's kernels, the search for a host's name, a disk.

    Args:
        seconds: for each step.
        lacking: says who is behind, given what is under way; called in the thread.
        speaks: whether this rank prints the line.
    """

    def __init__(self, seconds: float, lacking: Callable[[str], str], speaks: bool):
        self._seconds, self.lacking, self._speaks = seconds, lacking, speaks
        self._ended = threading.Event()
        self.step("starting")
        threading.Thread(target=self._watch, daemon=True).start()

    def step(self, doing: str) -> None:
        """Begins another step, in words that go on from `while`."""
        self.doing, self._since = doing, time.monotonic()

    def again(self) -> None:
        """What is under way has come further: as much time once more."""
        self._since = time.monotonic()

    def over(self) -> None:
        """Nothing is waited for any more."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            if time.monotonic() - self._since > self._seconds:
                if self._speaks:
                    who = self.lacking(self.doing)
                    print(f"error: {who} did not answer within {self._seconds:g} s while {self.doing}", file=sys.stderr)
                    sys.stderr.flush()
                os._exit(1)
