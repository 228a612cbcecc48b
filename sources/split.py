"""A part of the stored images: the training, validation or test images of a run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IGNORED = -1
"""Label of an entry that only fills up a batch: it counts in no loss and no metric."""


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
