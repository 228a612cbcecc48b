"""The `digits` source: scikit-learn's bundled handwritten digits, rendered in CIFAR-10's shape; nothing to download.

Real handwriting (1,797 images of 8x8 pixels from the UCI optical recognition set) gives 50,000 train and 10,000 test
colour images of 3x32x32, so that every recipe and benchmark for CIFAR-10 runs on it unchanged. Train and test come from
different originals, so the test accuracy measures generalisation.
"""

from pathlib import Path

import numpy as np

from cifar_zero.config.settings import DataConfig
from cifar_zero.data import cache

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TRAIN_PER_CLASS = 5_000
TEST_PER_CLASS = 1_000
VERSION = 1  # raise it with every change of the rendered pixels, so that old caches are replaced

SEED = 20_090_408
"""Seed of the split and of every variation; independent of the run's seed, so that all runs see the same images."""


def class_names(config: DataConfig) -> tuple[str, ...]:
    return CLASSES


def cache_key(config: DataConfig) -> str:
    return "digits"


def fingerprint(config: DataConfig) -> str:
    return f"version {VERSION}"


def build(config: DataConfig, directory: Path) -> tuple[str, ...]:
    """Renders both splits into `directory` (about 5 s on one core); returns the class names."""
    from sklearn.datasets import load_digits

    from cifar_zero.data import digits_render
    from cifar_zero.data.dataset import stratified_split

    pixels, targets = load_digits(return_X_y=True)  # (1797, 64) with 17 levels of ink, (1797,)
    originals = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)
    labels = targets.astype(np.int64)
    train_rows, test_rows = stratified_split(labels, 0.164, SEED)  # a sixth of each class, rounded down
    for split, rows, per_class, seed in (
        ("train", train_rows, TRAIN_PER_CLASS, SEED + 1),
        ("test", test_rows, TEST_PER_CLASS, SEED + 2),
    ):
        images_out, labels_out = cache.allocate(directory, split, per_class * len(CLASSES))
        start = 0
        for images, batch_labels in digits_render.render(originals[rows], labels[rows], per_class, seed):
            end = start + len(images)
            images_out[start:end], labels_out[start:end] = images, batch_labels
            start = end
    return CLASSES
