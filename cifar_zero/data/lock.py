"""A lock on a file, held during preparation that other ranks and runs would otherwise repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from cifar_zero.core.console import say

PATIENCE_S = 1.0
"""Seconds before a waiting process tells the user that it waits."""


@contextmanager
def locked(path: Path, work: str) -> Iterator[None]:
    """Holds the lock file at `path`; `work` says what its holder does ("prepares cifar10").

    The operating system releases the lock when its holder ends in any way, so a killed run blocks nobody. The file
    stays: if it were removed, two processes could hold the lock.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=PATIENCE_S)
    except Timeout:
        say(f"Waiting for another process that {work} (it holds {path}).")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
