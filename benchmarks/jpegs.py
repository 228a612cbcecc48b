"""A folder of made-up JPEG images, in the layout of the `folder` source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 10
TEST_SHARE = 6
"""Every sixth image is a test image, as in CIFAR-10."""


def make_folder(directory: Path, count: int) -> None:
    """Writes `count` images of 32x32 pixels, about as large as CIFAR's as JPEG files (1 kB each).

    Coarse noise, scaled up: an image of finer noise would be twice as large.
    """
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in range(CLASSES):
            (directory / split / f"class{label}").mkdir(parents=True)
    for number in range(count):
        split = "train" if number % TEST_SHARE else "test"
        noise = rng.integers(0, 256, size=(8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((32, 32), Image.Resampling.BILINEAR)
        image.save(directory / split / f"class{number // TEST_SHARE % CLASSES}" / f"{number:06d}.jpg", quality=90)
