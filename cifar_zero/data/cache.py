"""Stores decoded images in a cache. Images are decoded once, and then memory-mapped by every rank and every later run.

One directory per source holds `train_images.npy`, `train_labels.npy`, `test_images.npy`, `test_labels.npy` and
`meta.json`. It is written next to its final place, flushed to the disk and renamed in one step, so that a reader sees a
complete cache or none, even if a writer is killed.
"""

import errno
import json
import os
import shutil
import tokenize
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import AcquireReturnProxy, FileLock, Timeout
from numpy.typing import NDArray

from cifar_zero.core import atomic
from cifar_zero.core.console import say
from cifar_zero.core.errors import RunError, UsageError, short
from cifar_zero.models import IMAGE_SHAPE

SCHEMA = 3
"""Version of this layout, which stores channels last and checksums of all bytes. A cache with another version is
replaced."""

META = "meta.json"
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
READ_BYTES = 2**20  # of an array at once for its checksum; mapped pages would count as memory of the rank

_DAMAGE = (OSError, ValueError, KeyError, TypeError, tokenize.TokenError)
"""Exceptions of reading a missing or damaged cache. NumPy (2.4) raises tokenize.TokenError for some headers of an
array."""

_USERS_MISTAKES = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


@dataclass(frozen=True)
class Dataset:
    """Holds decoded images and labels as read-only memory maps, so that the ranks of a node share the same pages of
    memory. Images are stored in the shape (N, H, W, 3). Seen as (N, 3, H, W), they have torch's format channels_last,
    which is faster on a CPU, without a copy."""

    name: str  # the source that the images come from (never `auto`)
    classes: tuple[str, ...]  # name of each class; a label is an index into it
    train_images: NDArray[np.uint8]  # RGB, (N, H, W, 3); H and W are 32, except for a folder source
    train_labels: NDArray[np.int64]  # (N,)
    test_images: NDArray[np.uint8]  # RGB, (M, H, W, 3)
    test_labels: NDArray[np.int64]  # (M,)
    identity: Mapping[str, int]  # numbers of images, and checksums: equal only for the same images in the same order


def ensure(
    directory: Path, source: str, classes: tuple[str, ...], fingerprint: str, build: Callable[[Path], None]
) -> None:
    """Builds the cache of decoded images in `directory` if it is missing, out of date or damaged. Any number of
    processes may call this at once: one builds, and the others wait. Prints a note if the cache belongs to another user
    than root. Raises UsageError if the place cannot be written to or holds other files, and RunError if writing fails,
    for example on a full disk.

    Args:
        classes: name of each class, in the order of the labels.
        fingerprint: text that changes if the decoded images would change.
        build: fills an empty directory with the arrays that `allocate` creates in it.
    """
    expected = {"schema": SCHEMA, "source": source, "fingerprint": fingerprint, "classes": [*classes]}
    if _is_ready(directory, expected):
        owner = directory.stat().st_uid
        if os.geteuid() not in (0, owner) and owner != 0:
            say(
                f"note: {directory} belongs to user {owner}, who can change its images; --data.cache DIR makes your own"
            )
        return
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with locked(directory.with_name(f"{directory.name}.lock"), f"prepares {source}"):
            if not _is_ready(directory, expected):
                _write(directory, expected, build)
    except OSError as error:
        kind = UsageError if error.errno in _USERS_MISTAKES else RunError
        raise kind(
            f"cannot prepare the images of {source}: {error.strerror or error}: {error.filename or directory}; "
            "fix this, or choose another directory with --data.cache DIR or --data.root DIR"
        ) from error


def locked(path: Path, work: str) -> AcquireReturnProxy:
    """Takes the lock file at `path` until the end of a `with` block, or until the process ends. The file is never
    removed, because two processes could then hold the lock. `work` says what the holder does, such as "prepares x", for
    the message to a process that waits."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=1.0)  # seconds until the user gets a message
    except Timeout:
        say(f"Waiting for another process that {work} (it holds {path}).")
        return lock.acquire()


def allocate(
    directory: Path, split: str, count: int, side: int = IMAGE_SHAPE[1]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Creates the arrays of a split ("train" or "test") on the disk: images uint8 (count, side, side, 3) and labels
    int64 (count,). For train, prints that the images are being prepared. A source calls it after its download."""
    if split == "train":
        say(f"Preparing the images in {directory.parent} (only once).")
    images = _create(directory / f"{split}_images.npy", (count, side, side, IMAGE_SHAPE[0]), np.uint8)
    return images, _create(directory / f"{split}_labels.npy", (count,), np.int64)


def load(directory: Path) -> Dataset:
    """Maps the cache in `directory`, which `ensure` has prepared. Raises RunError if it is missing or damaged, or if
    another process replaces it during this call, because the files could then be from two caches."""
    try:
        meta = _read_meta(directory)
        arrays = {name: _open(directory, name) for name in ARRAYS}
        if _read_meta(directory) != meta:
            raise RunError(f"another run has just replaced the decoded images in {directory}: start again")
    except _DAMAGE as error:
        raise RunError(f"no decoded images in {directory}: prepare the data first") from error
    counts = {split: len(arrays[f"{split}_labels"]) for split in ("train", "test")}
    identity = counts | meta["checksums"]
    return Dataset(name=meta["source"], classes=tuple(meta["classes"]), **arrays, identity=identity)


def _is_ready(directory: Path, expected: Mapping[str, Any]) -> bool:
    try:
        return _read_meta(directory) == {**expected, "checksums": _checksums(directory)}
    except _DAMAGE:
        return False


def _read_meta(directory: Path) -> dict[str, Any]:
    return json.loads((directory / META).read_text(encoding="utf-8"))


def _write(directory: Path, meta: Mapping[str, Any], build: Callable[[Path], None]) -> None:
    """Builds a new cache with the entries `meta` in META, and replaces the old one. The caller must hold the lock.
    Raises UsageError if the folder to be replaced is not a cache."""
    temporary = atomic.staged(directory)
    for folder in (directory, temporary):
        _check_only_cache(folder)
    atomic.discard(temporary)  # left by a killed writer, because only the holder of the lock writes
    if directory.exists():
        say(f"The decoded images of {meta['source']} in {directory} are out of date or damaged.")
    temporary.mkdir()
    try:
        build(temporary)
        content = {**meta, "checksums": _checksums(temporary)}
        (temporary / META).write_text(json.dumps(content, indent=1), encoding="utf-8")
        atomic.put_in_place(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_only_cache(folder: Path) -> None:
    files = {META, *(f"{name}.npy" for name in ARRAYS)}
    if foreign := sorted({entry.name for entry in folder.glob("*")} - files):
        raise UsageError(
            f"{folder} is the place for decoded images, but it contains other files ({short(', '.join(foreign))}): "
            "choose another directory with --data.cache DIR, or move this folder"
        )


def _create(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> np.memmap[Any, Any]:
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):  # not on macOS
        # Reserves the blocks, which raises an error on a full disk. Writing to the map would kill the process (SIGBUS).
        with path.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _open(directory: Path, name: str) -> np.memmap[Any, Any]:
    return np.lib.format.open_memmap(directory / f"{name}.npy", mode="r")  # refuses what is not a .npy file


def _checksums(directory: Path) -> dict[str, int]:
    """Returns the CRC-32 of the elements of each array, by the array's name. In memory, a gigabyte takes less than a
    second."""
    checksums: dict[str, int] = {}
    for name in ARRAYS:
        array, checksum = _open(directory, name), 0
        with (directory / f"{name}.npy").open("rb") as file:
            file.seek(array.offset)
            while part := file.read(READ_BYTES):
                checksum = zlib.crc32(part, checksum)
        checksums[name] = checksum
    return checksums
