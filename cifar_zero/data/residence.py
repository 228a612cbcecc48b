"""Where the stored images live during a run, and how blocks of them come to the device that works on them."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RESIDENT_SHARE = 1 / 4
"""Share of a GPU's free memory that stored images may take; the network's memory is allocated later. All of CIFAR-10
takes 184 MB."""


class Stored:
    """Stored images, in the memory of the device that works on them or in the host's."""

    def __init__(self, images: Tensor, device: torch.device) -> None:
        """`images`: uint8 (N, 32, 32, 3), on the device or on the CPU; `device`: where blocks are wanted."""
        self._images = images
        self.device = device
        """Where the blocks are."""
        self.rows_device = images.device
        """Where the row numbers are wanted."""

    def take(self, rows: Tensor) -> Tensor:
        """The images at row numbers int64 (n,): uint8 (n, 32, 32, 3)."""
        block = self._images.index_select(0, rows)
        if self.rows_device.type == self.device.type:
            return block
        # From pinned memory the copy is queued, and the host gathers the next block while the GPU works. torch reuses
        # pinned memory only after the copies queued from it.
        return block.pin_memory().to(self.device, non_blocking=True)


def place(images: NDArray[np.uint8], device: torch.device | str) -> Stored:
    """Brings stored images (N, 3, 32, 32) to where batches are wanted.

    They go to a GPU if they take no more than RESIDENT_SHARE of its free memory, else they stay on the host. For
    devices other than GPUs blocks stay on the CPU.
    """
    with warnings.catch_warnings():
        # The map is read-only, so that no rank can spoil the others' images; nothing here writes to it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        stored = torch.from_numpy(images.transpose(0, 2, 3, 1))
    device = torch.device(device)
    if device.type != "cuda":
        return Stored(stored, stored.device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    fits = stored.nbytes <= free_bytes * RESIDENT_SHARE
    return Stored(stored.to(device) if fits else stored, device)
