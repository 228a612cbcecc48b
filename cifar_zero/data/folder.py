"""Reads the `folder` source, the user's own images: <root>/train/<class>/*.png|jpg and
<root>/test/<class>/*.png|jpg."""

import hashlib
import os
import sys
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from tqdm import tqdm

from cifar_zero.config.recipe import DataConfig
from cifar_zero.core.errors import UsageError
from cifar_zero.data import cache
from cifar_zero.models import IMAGE_SHAPE

SUFFIXES = (".png", ".jpg", ".jpeg")

SPLITS = ("train", "test")
_LAYOUT = "--data.source folder reads <root>/train/<class>/*.png|jpg and <root>/test/<class>/*.png|jpg"

FORMATS = ("PNG", "JPEG")
"""The only decoders that Pillow may try, whatever the suffix of a file. Other decoders start programs, such as
Ghostscript for EPS."""

MAX_PIXELS = 8192 * 8192
"""Largest number of pixels of an image. Such an image takes 200 MB as RGB on each core that decodes one. The limit is
higher than the 50 megapixels of a camera."""

CHUNK = 64  # images that a thread takes at a time: enough that handing them out costs nothing

Image.MAX_IMAGE_PIXELS = None  # Pillow would warn from 89 million pixels on, and refuse twice as many


def class_names(config: DataConfig) -> tuple[str, ...]:
    """Returns the names of the directories under train/, sorted.

    Raises:
        UsageError: if a directory is missing or unreadable, if the name of a class cannot be printed, if there are
            fewer than two classes, if a class has no images, or if test/ has other classes than train/.
    """
    train, test = (_folders(Path(config.root) / split) for split in SPLITS)
    if len(train) < 2:
        actual = "none"
        if train:
            actual = f"only {train[0]}"
        raise UsageError(f"{config.root}/train needs two or more classes, but has {actual}: {_LAYOUT}")
    if train != test:
        differing = ", ".join(sorted({*train} ^ {*test}))
        raise UsageError(f"{config.root}/train and test must have the same classes; in one only: {differing}")
    for name in train:
        if not name.isprintable():
            raise UsageError(f"{config.root}/train has the class {name!r}: give its folder a name that can be printed")
        for split in SPLITS:
            directory = Path(config.root) / split / name
            if not any(_image_files(directory)):
                raise UsageError(f"no {', '.join(SUFFIXES)} images in {directory}: {_LAYOUT}")
    return train


def cache_key(config: DataConfig) -> str:
    size = f"-{config.image_size}" if config.image_size != IMAGE_SHAPE[1] else ""
    return f"folder-{hashlib.sha256(os.fsencode(Path(config.root).resolve())).hexdigest()[:16]}{size}"


def fingerprint(config: DataConfig) -> str:
    """Returns a hash of the class, name, size and modification time of all images (0.3 s for 60,000 images). Raises
    UsageError if the folders are not valid, or if an image's file is not accessible."""
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


def write_arrays(config: DataConfig, directory: Path) -> None:
    """Decodes every image, on all cores. Raises UsageError for the first unreadable image."""
    for split in SPLITS:
        files = _labelled_files(config, split)
        images, labels = cache.allocate(directory, split, len(files), config.image_size)
        labels[:] = [label for _, label in files]
        _decode_all([path for path, _ in files], images, f"Decoding {split} images")


def _labelled_files(config: DataConfig, split: str) -> list[tuple[str, int]]:
    files: list[tuple[str, int]] = []
    for label, name in enumerate(class_names(config)):
        files += [(path, label) for path in sorted(_image_files(Path(config.root) / split / name))]
    return files


def _folders(directory: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in _entries(directory) if entry.is_dir()))


def _image_files(directory: Path) -> Iterator[str]:
    for entry in _entries(directory):
        if entry.name.lower().endswith(SUFFIXES) and entry.is_file():
            yield entry.path  # a string: Path objects take longer to make and sort than the files to list


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yields the entries of a directory, except those whose names begin with a dot, such as .DS_Store. Raises
    UsageError if the directory cannot be read."""
    try:
        with os.scandir(directory) as entries:
            yield from (entry for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise UsageError(f"cannot read {directory}: {error.strerror}; {_LAYOUT}") from error


def decode(path: str | Path, side: int = IMAGE_SHAPE[1]) -> NDArray[np.uint8]:
    """Reads an image file of any size and mode as RGB pixels uint8 (side, side, 3), turned as its EXIF data says.

    Transparency is ignored. An image of another size is scaled to `side` pixels on its shorter side (bilinear with
    antialiasing, torchvision's default) and cropped at its centre. Raises UsageError if the file cannot be read as a
    PNG or JPEG image, or has more than MAX_PIXELS pixels.
    """
    try:
        with Image.open(path, formats=FORMATS) as file:  # reads only the header
            if file.width * file.height > MAX_PIXELS:
                raise ValueError(f"it has {file.width} x {file.height} pixels, more than {MAX_PIXELS:,}")
            image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I"):  # 16 bits, which Pillow (13.0) would clip to 8
                image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
            image = image.convert("RGB")
    except UnidentifiedImageError as error:
        raise UsageError(f"cannot read the image {path}: it is not a PNG or JPEG file; convert or remove it") from error
    except Exception as error:  # Pillow's decoders raise a dozen kinds, from OSError to struct.error
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"cannot read the image {path}: {why}; fix or remove it") from error
    if image.size != (side, side):
        image = ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
    return np.asarray(image)


def _decode_all(paths: list[str], images: NDArray[np.uint8], title: str) -> None:
    """Decodes image files on all cores into the rows of `images` (N, side, side, 3), with a progress bar. Raises
    UsageError for the first unreadable image."""

    def decode_row(row: int) -> None:
        images[row] = decode(paths[row], images.shape[2])

    interval_s = 0.1
    if not sys.stderr.isatty():  # a log file, a cluster's job output
        interval_s = 10.0
    # Threads suffice, because Pillow decodes outside the interpreter's lock. Processes are not used, because they would
    # survive a killed run and keep the cache's lock.
    with ThreadPool(os.cpu_count()) as pool:
        decoded = pool.imap(decode_row, range(len(paths)), CHUNK)
        for _ in tqdm(decoded, title, len(paths), mininterval=interval_s):
            pass
