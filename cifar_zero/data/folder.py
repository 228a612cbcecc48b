"""The `folder` source: the user's own images, as <root>/train/<class>/*.png|jpg and <root>/test/<class>/*.png|jpg."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from cifar_zero.config.settings import DataConfig
from cifar_zero.core.errors import UsageError
from cifar_zero.models import IMAGE_SHAPE

SPLITS = ("train", "test")
SUFFIXES = (".png", ".jpg", ".jpeg")

_LAYOUT = "a folder source is <root>/train/<class>/*.png|jpg and <root>/test/<class>/*.png|jpg"


def class_names(config: DataConfig) -> tuple[str, ...]:
    """Returns the names of the directories under train/, sorted. Raises UsageError if a directory is missing or
    unreadable or has control characters in its name, there are fewer than two classes, a class has no images, or test/
    has other classes than train/."""
    entries = (_entries(Path(config.root) / split) for split in SPLITS)
    train, test = (tuple(sorted(entry.name for entry in each if entry.is_dir())) for each in entries)
    if len(train) < 2:
        found = f"only {train[0]}" if train else "none"
        raise UsageError(f"{config.root}/train needs two or more classes, found {found}: {_LAYOUT}")
    if train != test:
        differing = ", ".join(sorted({*train} ^ {*test}))
        raise UsageError(f"{config.root}/train and test must have the same classes; in one only: {differing}")
    for name in (name for name in train if not name.isprintable()):
        raise UsageError(f"{config.root}/train has the class {name!r}: give its folder a name that can be printed")
    for directory in (Path(config.root) / split / name for split in SPLITS for name in train):
        if next(_image_files(directory), None) is None:
            raise UsageError(f"no {', '.join(SUFFIXES)} images in {directory}: {_LAYOUT}")
    return train


def cache_key(config: DataConfig) -> str:
    size = f"-{config.image_size}" if config.image_size != IMAGE_SHAPE[1] else ""
    return f"folder-{hashlib.sha256(os.fsencode(Path(config.root).resolve())).hexdigest()[:16]}{size}"


def fingerprint(config: DataConfig) -> str:
    """Returns a hash of all images' class, name, size and time (0.3 s for 60,000). Raises UsageError."""
    digest = hashlib.sha256(repr(class_names(config)).encode(errors="surrogateescape"))
    for split in SPLITS:
        for path, label in _labelled_files(config, split):
            try:
                status = os.stat(path)
            except OSError as error:
                raise UsageError(f"cannot read the image {path}: {error.strerror}") from error
            line = f"{split} {label} {status.st_size} {status.st_mtime_ns} ".encode()
            digest.update(line + os.fsencode(os.path.basename(path)) + b"\n")
    return digest.hexdigest()


def build(config: DataConfig, directory: Path) -> tuple[str, ...]:
    """Decodes every image, on all cores; returns the class names. Raises UsageError for the first unreadable image."""
    # Here, as `cifar-zero predict` needs SUFFIXES for an error in its command line.
    from cifar_zero.data import cache
    from cifar_zero.data.images import decode_all

    for split in SPLITS:
        files = _labelled_files(config, split)
        images, labels = cache.allocate(directory, split, len(files), config.image_size)
        labels[:] = [label for _, label in files]
        decode_all([path for path, _ in files], images, f"Decoding {split} images")
    return class_names(config)


def _labelled_files(config: DataConfig, split: str) -> list[tuple[str, int]]:
    """Returns the path and label of each image of a split, by class and then by name."""
    return [
        (path, label)
        for label, name in enumerate(class_names(config))
        for path in sorted(_image_files(Path(config.root) / split / name))
    ]


def _image_files(directory: Path) -> Iterator[str]:
    for entry in _entries(directory):
        if entry.name.lower().endswith(SUFFIXES) and entry.is_file():
            yield entry.path  # a string: Path objects take longer to make and sort than the files to list


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yields the entries of a directory, without hidden files (.DS_Store, .ipynb_checkpoints)."""
    try:
        with os.scandir(directory) as entries:
            yield from (entry for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise UsageError(f"cannot read {directory}: {error.strerror}; {_LAYOUT}") from error
