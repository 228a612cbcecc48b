"""Writes files and folders atomically: after a crash at any moment, the previous version is complete and can be
found."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cifar_zero.core.console import say

STAGED = ".tmp"  # suffix of a file or folder while it is being written
ASIDE = ".old"  # suffix of the previous folder while the new one is renamed to its final name


def staged(final: Path) -> Path:
    """Returns the temporary path at which the content of `final` is written before it is renamed."""
    return final.with_name(final.name + STAGED)


def discard(path: Path) -> None:
    """Removes a file or a folder if it exists. A folder is renamed first, so that no process finds it half removed."""
    if path.is_dir() and not path.is_symlink():
        if not path.name.endswith(STAGED):
            discard(staged(path))  # left by a process that was killed in this function
            path = path.rename(staged(path))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """Yields the path of a new, empty file, which replaces `final` at the end of the block. After an error the new file
    is removed, and `final` stays as it was. A file that is already at the temporary path is removed first, so that no
    link of another user is followed. An OSError without a file name gets the name of `final`."""
    new = staged(final)
    with named(final):
        new.unlink(missing_ok=True)
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))  # with O_EXCL, a link is an error
        try:
            yield new
            put_in_place(final)
        finally:
            new.unlink(missing_ok=True)


def put_in_place(final: Path) -> None:
    """Flushes the file or folder at `staged(final)` to disk, and renames it to `final`, which it replaces."""
    new, old = staged(final), final.with_name(final.name + ASIDE)
    for path in (*new.rglob("*"), new) if new.is_dir() else (new,):
        flush_to_disk(path)
    if new.is_dir():
        if final.exists():  # a rename cannot replace a folder that is not empty
            discard(old)  # left by a writer that was killed after both renames
            final.rename(old)
        new.rename(final)
        discard(old)
    else:
        new.replace(final)
    flush_to_disk(final.parent)


def recover(folder: Path) -> None:
    """Renames the previous *.ckpt folders under a folder back to their final names, after a crash between the two
    renames of `put_in_place`."""
    for old in folder.rglob(f"*{ASIDE}"):
        final = old.with_name(old.name.removesuffix(ASIDE))
        if final.suffix == ".ckpt" and not final.exists():
            with suppress(FileNotFoundError):  # another rank was faster
                old.rename(final)


def remove_unfinished(folder: Path) -> None:
    """Removes what a process that was killed while writing a checkpoint left in a folder: the unfinished checkpoint,
    and the previous one if it was already replaced. Several processes may call it at the same time."""
    for left in (*folder.glob(f"*.ckpt*{STAGED}"), *folder.glob(f"*.ckpt{ASIDE}")):
        with suppress(OSError):  # another process was faster, or the folder is read-only
            discard(left)


def flush_to_disk(path: Path) -> None:
    """Writes a file, or the entries of a folder, to disk now (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def named(file: Path) -> Iterator[None]:
    """Adds the name of a file to an OSError without a file name that the `with` block raises, as Python does if a file
    becomes too large or the disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


def write(file: Path, content: bytes) -> None:
    """Writes a file completely or not at all. Raises OSError, with the name of the file, if it cannot be written."""
    with replacing(file) as new:
        new.write_bytes(content)


def write_json(file: Path, values: Mapping[str, Any] | list[Any]) -> None:
    """Writes a JSON file completely or not at all. NaN and infinities, which JSON lacks, become null."""
    finite = json.loads(json.dumps(values), parse_constant=lambda _: None)
    write(file, json.dumps(finite, indent=2, ensure_ascii=False).encode() + b"\n")


def failure_of(write: Callable[[], Any]) -> str:
    """Calls `write` and returns its error message, or "" if there was none. No Exception is passed on, because an
    exception that ends one rank would leave the other ranks waiting for it."""
    try:
        write()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, OSError):  # Lightning's loggers (2.6.6) wrap it
            cause = cause.__cause__
        if isinstance(cause, OSError):
            return cause.strerror or str(cause) or type(cause).__name__
        return f"{type(error).__name__}: {error}"
    return ""


def attempt(write: Callable[[], Any], what: object) -> bool:
    """Calls `write` and returns whether it succeeded. An error does not end the run, but is printed as "`what` could
    not be written"."""
    failure = failure_of(write)
    if failure:
        say(f"{what} could not be written: {failure}. The training continues.")
    return not failure
