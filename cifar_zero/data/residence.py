"""Placement of the stored images on a GPU or the host, and the transfer of blocks to the device."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RESIDENT_SHARE = 1 / 4
"""Share of a GPU's free memory that stored images may take, as the model's memory is allocated later. CIFAR-10 takes
184 MB."""


class Stored:
    """Stored images uint8 (N, 32, 32, 3), in the memory of the device that processes them or in the host's.

    Attributes:
        device: of the blocks that `take` returns.
        rows_device: the device that row numbers have to be on.
    """

    def __init__(self, images: Tensor, device: torch.device) -> None:
        self._images = images
        self.device = device
        self.rows_device = images.device

    def take(self, rows: Tensor) -> Tensor:
        """Returns the images at row numbers int64 (n,): uint8 (n, 32, 32, 3)."""
        block = self._images.index_select(0, rows)
        if self.rows_device.type == self.device.type:
            return block
        # From pinned memory the copy is queued, and the host gathers the next block while the GPU works. torch reuses
        # pinned memory only after the copies queued from it.
        return block.pin_memory().to(self.device, non_blocking=True)


def place(images: NDArray[np.uint8], device: torch.device | str) -> Stored:
    """Places stored images (N, 3, 32, 32) for batches on `device`.

    On a GPU if they take at most RESIDENT_SHARE of its free memory, else on the host. For devices other than GPUs the
    blocks stay on the CPU.
    """
    with warnings.catch_warnings():
        # The map is read-only to protect the other ranks' images; nothing here writes to it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        stored = torch.from_numpy(images.transpose(0, 2, 3, 1))
    device = torch.device(device)
    if device.type != "cuda":
        return Stored(stored, stored.device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    fits = stored.nbytes <= free_bytes * RESIDENT_SHARE
    return Stored(stored.to(device) if fits else stored, device)
