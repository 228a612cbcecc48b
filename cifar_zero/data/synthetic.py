"""Makes the `synthetic` source, any number of images of random pixels, to measure speed. A model cannot learn anything
from them."""

from pathlib import Path

import numpy as np

from cifar_zero.config.recipe import DataConfig
from cifar_zero.data import cache
from cifar_zero.data.classes import CLASSES
from cifar_zero.models import IMAGE_SHAPE

SEED = 0
CHUNK = 4096  # images generated at once (12 MB), so that a set may be larger than the memory


def cache_key(config: DataConfig) -> str:
    return f"synthetic-{config.synthetic_size}"


def fingerprint(config: DataConfig) -> str:
    return f"seed {SEED}"


def write_arrays(config: DataConfig, directory: Path) -> None:
    """Writes uniformly random pixels, with labels 0, 1, ..., 9, 0, ... There are at most 10,000 test images."""
    rng = np.random.default_rng(SEED)
    for split, count in (("train", config.synthetic_size), ("test", min(10_000, config.synthetic_size))):
        images, labels = cache.allocate(directory, split, count)
        for start in range(0, count, CHUNK):
            chunk = images[start : start + CHUNK]
            chunk[:] = rng.integers(0, 256, (len(chunk), *IMAGE_SHAPE), np.uint8).transpose(0, 2, 3, 1)
        labels[:] = np.arange(count) % len(CLASSES["synthetic"])
