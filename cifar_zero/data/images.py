"""Decodes an image file to the pixels that the model sees."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from cifar_zero.core.errors import UsageError
from cifar_zero.models import IMAGE_SHAPE

FORMATS = ("PNG", "JPEG")
"""Pillow tries only these decoders, whatever a file's name says: others start programs (EPS: Ghostscript)."""

MAX_PIXELS = 8192 * 8192
"""Most pixels of an image: 200 MB as RGB for each core that decodes, and more than a camera's 50 megapixels."""

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
            if image.mode.startswith("I"):  # 16-bit grey (I;16 and I, where 65,535 is white), which Pillow (13.0) clips
                image = Image.fromarray((np.asarray(image) / 257).round().clip(0, 255).astype(np.uint8))
            image = image.convert("RGB")
    except UnidentifiedImageError as error:
        raise UsageError(f"cannot read the image {path}: it is not PNG or JPEG; convert or remove it") from error
    except Exception as error:  # Pillow's decoders raise a dozen kinds, from OSError to struct.error
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"cannot read the image {path}: {why}; fix or remove it") from error
    if image.size != (side, side):
        image = ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)
