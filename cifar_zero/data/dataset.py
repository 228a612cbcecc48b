"""The images: what every source delivers, memory-mapped, and the part of it that a loader reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORED = -1
"""Label of an entry that only fills up a batch: it counts in no loss and no metric."""


@dataclass(frozen=True)
class Dataset:
    """Decoded images and labels, as read-only memory maps: ranks on one machine share the same pages of memory.

    In memory the three bytes of a pixel lie side by side, as in torch's channels_last: a line of an image is one piece,
    and batches in that format, with which a CPU works faster, need no rearranging.
    """

    name: str
    """The source that the images really come from (never `auto`)."""

    classes: tuple[str, ...]
    """Name of each class; a label is an index into it."""

    train_images: NDArray[np.uint8]
    """Shape (N, 3, 32, 32), RGB."""

    train_labels: NDArray[np.int64]
    """Shape (N,)."""

    test_images: NDArray[np.uint8]
    """Shape (M, 3, 32, 32), RGB."""

    test_labels: NDArray[np.int64]
    """Shape (M,)."""


class Split:
    """Some of the stored images, by position: 0 ... count - 1, and one more at `count`, a repeat to be ignored."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64], indices: NDArray[np.int64]) -> None:
        """`images` (N, 3, 32, 32) and `labels` (N,) are all that is stored; `indices` (n >= 1,) says which belong."""
        self.images = images
        """All stored images, uint8 (N, 3, 32, 32)."""
        self.indices = np.append(indices, indices[0])
        """Row of `images` at each position, int64 (count + 1,)."""
        self.labels = np.append(labels[indices], IGNORED)
        """Label at each position, int64 (count + 1,); the last is IGNORED."""
        self.count = len(indices)
        """Images, without the ignored entry."""
