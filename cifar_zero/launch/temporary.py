"""The folder for the temporary files of a run's ranks, which outlives its launcher only until the next run."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "cifar-zero-ranks-"


@contextmanager
def folder() -> Iterator[str]:
    """Makes a folder and removes it at the end of the block; also removes those whose launcher was killed. A launcher
    holds a lock on its folder, which the system releases when the launcher ends in any way."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or in use
            lock = _locked(left, fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    while True:
        made = tempfile.mkdtemp(prefix=PREFIX)
        with suppress(FileNotFoundError):
            lock = _locked(Path(made))
            if os.path.exists(made):  # else another launcher removed it before it was locked
                break
            os.close(lock)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def _locked(path: Path, options: int = 0) -> int:
    """Locks a folder; returns the descriptor that holds the lock. Raises BlockingIOError with LOCK_NB: it is held."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | options)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
