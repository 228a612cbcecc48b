"""Makes the `digits` source, which renders handwritten digits in CIFAR-10's shape, without a download.

digits.npz holds 1,797 images of 8x8 pixels, the test set of UCI's "Optical Recognition of Handwritten Digits" (E.
Alpaydin and C. Kaynak, 1998, doi.org/10.24432/C50P49, CC BY 4.0), which scikit-learn distributes too. From them, 50,000
train and 10,000 test colour images of 3x32x32 are rendered, so that every recipe for CIFAR-10 runs on them unchanged.
Train and test images come from different originals.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import affine_grid, grid_sample

from cifar_zero.config.recipe import DataConfig
from cifar_zero.data import cache
from cifar_zero.data.classes import CLASSES
from cifar_zero.data.dataset import stratified_split
from cifar_zero.models import IMAGE_SHAPE

ORIGINALS = Path(__file__).with_name("digits.npz")
"""File with two arrays: `pixels`, uint8 (1797, 64), with ink from 0 to 16, and `labels`, uint8 (1797,)."""

TRAIN_PER_CLASS = 5_000
TEST_PER_CLASS = 1_000
VERSION = 1  # raise it with every change of the rendered pixels, so that old caches are replaced

SEED = 20_090_408
"""Seed of the split and of every variation, instead of the run's seed, so that all runs see the same images."""


BATCH = 500  # images rendered at once: their float32 pixels (6 MB) fit a core's cache

# The ranges of the variation are wide enough that position and colour do not reveal the class, and small enough that a
# person can still read nearly every image.
ROTATION_RAD = 0.2  # 11 degrees either way; much more would turn a 1 towards a 7
SCALE = (0.7, 1.0)  # of the image's side, 32 pixels
SHEAR = 0.2
SHIFT = 0.15  # of half the image's side: 2.4 pixels either way
NOISE = (0.0, 0.3)  # half-width of an image's triangular noise, for pixels from 0 to 1


def cache_key(config: DataConfig) -> str:
    return "digits"


def fingerprint(config: DataConfig) -> str:
    return f"version {VERSION}"


def write_arrays(config: DataConfig, directory: Path) -> None:
    """Renders both splits into `directory` (about 5 s on one core)."""
    with np.load(ORIGINALS) as content:
        originals = (content["pixels"] / 16).astype(np.float32).reshape(-1, 8, 8)
        labels = content["labels"].astype(np.int64)
    train_rows, test_rows = stratified_split(labels, 0.164, SEED)  # a sixth of each class, rounded down
    for split, rows, per_class, seed in (
        ("train", train_rows, TRAIN_PER_CLASS, SEED + 1),
        ("test", test_rows, TEST_PER_CLASS, SEED + 2),
    ):
        images_out, labels_out = cache.allocate(directory, split, per_class * len(CLASSES["digits"]))
        start = 0
        for images, batch_labels in render(originals[rows], labels[rows], per_class, seed):
            end = start + len(images)
            images_out[start:end], labels_out[start:end] = images, batch_labels
            start = end


def render(
    originals: NDArray[np.float32], labels: NDArray[np.int64], per_class: int, seed: int
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Yields batches of images (m, 32, 32, 3) and labels (m,) in a shuffled order, with `per_class` images of each
    class in total.

    `originals` are (n, 8, 8) with ink from 0 to 1. The originals of a class are used equally often, but some once more
    if their number does not divide `per_class`.
    """
    rng = np.random.default_rng(seed)
    per_label = [np.resize(rng.permutation(np.flatnonzero(labels == k)), per_class) for k in np.unique(labels)]
    rows = rng.permutation(np.concatenate(per_label))
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        yield _colour(_strokes(originals[batch], rng), rng), labels[batch]


def _strokes(originals: NDArray[np.float32], rng: np.random.Generator) -> torch.Tensor:
    """Turns, scales, shears and moves each original at random. Returns ink (m, 1, 32, 32), float32 from 0 to 1."""
    count = len(originals)
    angle = rng.uniform(-ROTATION_RAD, ROTATION_RAD, count)
    scale = rng.uniform(*SCALE, count)
    shear = rng.uniform(-SHEAR, SHEAR, count)
    cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
    # The map from an output pixel to its place in the original, in grid_sample's coordinates (-1 to 1).
    theta = np.empty((count, 2, 3), dtype=np.float32)
    theta[:, 0, 0], theta[:, 0, 1] = cos, shear * cos - sin
    theta[:, 1, 0], theta[:, 1, 1] = sin, shear * sin + cos
    theta[:, :, 2] = rng.uniform(-SHIFT, SHIFT, (count, 2)) / scale[:, None]
    grid = affine_grid(torch.from_numpy(theta), [count, 1, *IMAGE_SHAPE[1:]], align_corners=False)
    return grid_sample(torch.from_numpy(originals)[:, None], grid, align_corners=False)


def _colour(strokes: torch.Tensor, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Paints ink (m, 1, 32, 32) on a background, both in random colours, and adds noise. Returns images uint8 (m, 32,
    32, 3)."""
    count = len(strokes)
    paper = rng.random((count, 1, 3), dtype=np.float32)
    candidates = rng.random((count, 8, 3), dtype=np.float32)
    # The ink gets the candidate farthest from the paper's colour, so that nearly every digit is visible.
    farthest = np.square(candidates - paper).sum(axis=2).argmax(axis=1)
    ink = candidates[np.arange(count), farthest]
    paper_t, ink_t = (torch.from_numpy(colour.reshape(count, 3, 1, 1)) for colour in (paper, ink))
    images = torch.addcmul(paper_t, strokes, ink_t - paper_t)
    # Two uniform bytes make a triangular distribution, which is several times faster to draw than a normal one.
    raw = rng.integers(0, 2**64, size=images.numel() // 4, dtype=np.uint64).view(np.uint8)
    noise = torch.from_numpy(raw).view(2, *images.shape).float()
    width = torch.from_numpy(rng.uniform(*NOISE, (count, 1, 1, 1)).astype(np.float32))
    images.addcmul_(noise[0].sub_(noise[1]), width / 255)
    return images.clamp_(0, 1).mul_(255).round_().to(torch.uint8).permute(0, 2, 3, 1).numpy()
