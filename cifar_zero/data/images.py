"""Decodes image files to the pixels that the model sees."""

import os
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from tqdm import tqdm

from cifar_zero.core.errors import UsageError
from cifar_zero.models import IMAGE_SHAPE

FORMATS = ("PNG", "JPEG")
"""Pillow tries only these decoders, whatever a file's name says: others start programs (EPS: Ghostscript)."""

MAX_PIXELS = 8192 * 8192
"""Most pixels of an image: 200 MB as RGB for each core that decodes, and more than a camera's 50 megapixels."""

CHUNK = 64  # images that a thread takes at a time: enough that handing them out costs nothing

Image.MAX_IMAGE_PIXELS = None  # Pillow would warn from 89 million pixels on, and refuse twice as many


def decode(path: str | Path, side: int = IMAGE_SHAPE[1]) -> NDArray[np.uint8]:
    """Reads an image file of any size and mode as RGB pixels (3, side, side), uint8, in the camera's orientation.

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
        raise UsageError(f"cannot read the image {path}: it is not PNG or JPEG; convert or remove it") from error
    except Exception as error:  # Pillow's decoders raise a dozen kinds, from OSError to struct.error
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"cannot read the image {path}: {why}; fix or remove it") from error
    if image.size != (side, side):
        image = ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)


def decode_all(paths: list[str], images: NDArray[np.uint8], title: str) -> None:
    """Decodes image files into the rows of `images` (N, 3, side, side), on all cores; `title` is the progress bar's.
    Raises UsageError for the first unreadable image."""

    def decode_row(row: int) -> None:
        images[row] = decode(paths[row], images.shape[2])

    interval_s = 0.1 if sys.stderr.isatty() else 10.0  # not a terminal: a log file, a cluster's job output
    # Threads, as Pillow decodes outside the interpreter's lock. Not processes: the children of a killed run would
    # survive it and keep the cache's lock.
    with ThreadPool(os.cpu_count()) as pool:
        decoded = pool.imap(decode_row, range(len(paths)), CHUNK)
        for _ in tqdm(decoded, title, len(paths), mininterval=interval_s):
            pass
