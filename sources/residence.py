"""Where the stored images live during a run, and how blocks of them come to the device that works on them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RESIDENT_SHARE = 1 / 4
"""Of a GPU's free memory that stored images may take, so that the network, whose memory comes later, finds room.
All of CIFAR-10 takes 184 MB."""


class Resident:
    """Stored images in the memory of the device: the map itself on the CPU, one copy of it on a GPU."""

    def __init__(self, images: Tensor) -> None:
        """`images`: uint8 (N, 32, 32, 3)."""
        self._images = images
        self.device = images.device
        """Where the blocks are."""
        self.rows_device = images.device
        """Where the row numbers are wanted."""

    def blocks(self, rows: Iterable[Tensor]) -> Iterator[Tensor]:
        """The images of each block of row numbers int64 (n,): uint8 (n, 32, 32, 3)."""
        for block in rows:
            yield self._images.index_select(0, block)


class Streamed:
    """Stored images in the memory of the host: each block goes to the GPU while it works on the block before."""

    def __init__(self, images: Tensor, device: torch.device) -> None:
        """`images`: uint8 (N, 32, 32, 3) on the CPU; `device`: a CUDA device."""
        self._images = images
        self._stream = torch.cuda.Stream(device)
        self.device = device
        """Where the blocks are."""
        self.rows_device = images.device
        """Where the row numbers are wanted."""

    def blocks(self, rows: Iterable[Tensor]) -> Iterator[Tensor]:
        """The images of each block of row numbers int64 (n,): uint8 (n, 32, 32, 3)."""
        sent: tuple[Tensor, torch.cuda.Event] | None = None
        for block in rows:
            following = self._send(block)
            if sent is not None:
                yield self._receive(*sent)
            sent = following
        if sent is not None:
            yield self._receive(*sent)

    def _send(self, rows: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Queues the copy of a block; returns the block and the event of its arrival."""
        # A fresh buffer each time: torch keeps pinned memory that is let go of, and hands it out again only when the
        # copies queued from it are done.
        pinned = torch.empty((len(rows), *self._images.shape[1:]), dtype=torch.uint8, pin_memory=True)
        torch.index_select(self._images, 0, rows, out=pinned)
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            block = pinned.to(self.device, non_blocking=True)
            arrived.record(self._stream)
        return block, arrived

    def _receive(self, block: Tensor, arrived: torch.cuda.Event) -> Tensor:
        """Makes the stream that computes wait for a block, without the host waiting."""
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(arrived)
        block.record_stream(computing)  # it was allocated for the other stream, which must not take it back too early
        return block


def place(images: NDArray[np.uint8], device: torch.device | str) -> Resident | Streamed:
    """Brings stored images (N, 3, 32, 32) to where batches are wanted.

    They go to a GPU where they take no more than a quarter of its free memory, else they stay on the host. For devices
    other than GPUs blocks stay on the CPU.
    """
    with warnings.catch_warnings():
        # The map is read-only, so that no rank can spoil the others' images; nothing here writes to it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        stored = torch.from_numpy(images.transpose(0, 2, 3, 1))
    device = torch.device(device)
    if device.type != "cuda":
        return Resident(stored)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if stored.nbytes <= free_bytes * RESIDENT_SHARE:
        return Resident(stored.to(device))
    return Streamed(stored, device)
