"""What every source delivers: the decoded images of both splits, memory-mapped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IMAGE_SHAPE = (3, 32, 32)
"""Channels (RGB), height and width in pixels of every image: CIFAR's, to which the other sources are brought."""


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
