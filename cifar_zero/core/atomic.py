"""Writes a file or a folder so that a crash at any moment leaves the previous one whole, and findable;
reports errors of writing that must not end a run."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cifar_zero.core.console import say

STAGED = ".tmp"  # suffix of what is being written
ASIDE = ".old"  # suffix of the previous folder, for the instant in which the new one gets its name


def staged(final: Path) -> Path:
    """Returns the temporary path under which something is written."""
    return final.with_name(final.name + STAGED)


def discard(path: Path) -> None:
    """Removes a file or a folder if it exists. A folder is renamed first, so that nobody finds half of it."""
    if path.is_dir() and not path.is_symlink():
        if not path.name.endswith(STAGED):
            discard(staged(path))  # left by a process that was killed while it discarded the folder
            path = path.rename(staged(path))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put_in_place(final: Path) -> None:
    """Flushes what was staged to the disk and renames it to its final name, in place of the previous one."""
    new, old = staged(final), final.with_name(final.name + ASIDE)
    for path in (*new.rglob("*"), new) if new.is_dir() else (new,):
        flush_to_disk(path)
    if new.is_dir():
        if final.exists():  # a folder cannot replace another one
            discard(old)  # left by a writer that was killed after both renames
            final.rename(old)
        new.rename(final)
        discard(old)
    else:
        new.replace(final)
    flush_to_disk(final.parent)


def recover(folder: Path) -> None:
    """Gives previous checkpoints their names back if a crash came between the two renames."""
    for old in folder.rglob(f"*{ASIDE}"):
        final = old.with_name(old.name.removesuffix(ASIDE))
        if final.suffix == ".ckpt" and not final.exists():
            with suppress(FileNotFoundError):  # another rank was faster
                old.rename(final)


def remove_unfinished(folder: Path) -> None:
    """Removes what the killed writer of checkpoints has left in a folder; several processes may call it at once."""
    for left in (*folder.glob(f"*.ckpt*{STAGED}"), *folder.glob(f"*.ckpt{ASIDE}")):
        with suppress(OSError):  # another process was faster, or the folder is read-only
            discard(left)


def flush_to_disk(path: Path) -> None:
    """Makes the system write a file, or the names in a folder, to the disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(file: Path, content: bytes) -> None:
    """Writes a file, whole or not at all. Raises OSError: it cannot be written."""
    try:
        staged(file).write_bytes(content)
        put_in_place(file)
    finally:
        discard(staged(file))


def write_json(file: Path, values: Mapping[str, Any] | list[Any]) -> None:
    """Writes a JSON file, whole or not at all; NaN and infinities, which JSON lacks, become null."""
    finite = json.loads(json.dumps(values), parse_constant=lambda _: None)
    write(file, json.dumps(finite, indent=2, ensure_ascii=False).encode() + b"\n")


def failure_of(write: Callable[[], Any]) -> str:
    """Runs what writes to the disk on one rank; returns its error of any kind as text, empty if there was none: raised,
    it would leave the other ranks waiting for this one."""
    try:
        write()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, OSError):  # Lightning's loggers (2.6.6) hide it
            cause = cause.__cause__
        if isinstance(cause, OSError):
            return cause.strerror or str(cause) or type(cause).__name__
        return f"{type(error).__name__}: {error}"
    return ""


def attempt(write: Callable[[], Any], what: object) -> bool:
    """Runs what writes to the disk and returns whether it succeeded. Reports an error, which does not end the run."""
    failure = failure_of(write)
    if failure:
        say(f"{what} could not be written: {failure}. The training continues.")
    return not failure
