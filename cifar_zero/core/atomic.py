"""Writing a file or a folder so that a crash at any moment leaves the previous one whole, and found."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

STAGED = ".tmp"
"""Ends the name of what is being written."""

ASIDE = ".old"
"""Ends the name of the previous one, for the instant in which the new one takes its place."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Arguments of Linux's renameat2 (fcntl.h, linux/fs.h)."""


def staged(final: Path) -> Path:
    """Where something is written to before it is put into its place."""
    return final.with_name(final.name + STAGED)


def discard(path: Path) -> None:
    """Removes a file or a folder, if it is there: its name first, so that nobody finds half of it."""
    if path.is_dir() and not path.is_symlink():
        if not path.name.endswith(STAGED):
            path = path.rename(staged(path))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put_in_place(final: Path) -> None:
    """Flushes what was staged to the disk and gives it its name, instead of what had it before."""
    new = staged(final)
    for path in (*new.rglob("*"), new) if new.is_dir() else (new,):
        flush_to_disk(path)
    if not new.is_dir():
        new.replace(final)
    elif not final.exists():
        new.rename(final)
    elif _exchange(new, final):
        discard(new)  # the previous one by now
    else:
        old = final.with_name(final.name + ASIDE)
        final.rename(old)
        new.rename(final)
        discard(old)
    flush_to_disk(final.parent)


def recover(folder: Path) -> None:
    """Gives checkpoints that were put aside their names back, where a crash came between the two renames."""
    for old in folder.rglob(f"*{ASIDE}"):
        final = old.with_name(old.name.removesuffix(ASIDE))
        if final.suffix == ".ckpt" and not final.exists():
            old.rename(final)


def flush_to_disk(path: Path) -> None:
    """Has the system write a file, or the names in a folder, to the disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; False where the system or the file system cannot (macOS, NFS)."""
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "renameat2"):
        return False
    return libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0
