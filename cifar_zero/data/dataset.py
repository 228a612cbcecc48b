"""The memory-mapped images of a source, and the part of them that a loader reads."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORED = -1
"""Label of an entry that only pads a batch: no loss and no metric counts it."""


@dataclass(frozen=True)
class Dataset:
    """Decoded images and labels, as read-only memory maps: ranks on one node share the same pages of memory.

    In memory the three bytes of a pixel are adjacent, as in torch's channels_last: a line of an image is contiguous,
    and batches in that format, which is faster on a CPU, need no copy.

    Attributes:
        name: the source that the images come from (never `auto`).
        classes: name of each class; a label is an index into it.
        train_images: RGB, (N, 3, H, W), H and W 32 but for a folder source.
        train_labels: (N,).
        test_images: RGB, (M, 3, H, W).
        test_labels: (M,).
    """

    name: str
    classes: tuple[str, ...]
    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]


class Split:
    """Some of the stored images, by position: 0 ... count - 1, and at `count` a repeated one to be ignored.

    Attributes:
        images: all stored images, uint8 (N, 3, H, W).
        indices: row of `images` at each position, int64 (count + 1,).
        labels: label at each position, int64 (count + 1,); the last is IGNORED.
        count: images, without the ignored one.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64], indices: NDArray[np.int64]) -> None:
        """`images` (N, 3, H, W) and `labels` (N,) are all that is stored; `indices` (n >= 1,) are the split's."""
        self.images = images
        self.indices = np.append(indices, indices[0])
        self.labels = np.append(labels[indices], IGNORED)
        self.count = len(indices)


def stratified_split(
    labels: NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns sorted indices (train, held out) into `labels` (N,): `fraction` of every class is held out, rounded.

    At least one image of each class stays in train.
    """
    rng = np.random.default_rng(seed)
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        held_out[members[: min(round(fraction * len(members)), len(members) - 1)]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
