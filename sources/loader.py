"""The memory loader: whole micro-batches cut from the memory-mapped uint8 images, with no Python per image."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from sources.order import Order
from sources.split import Split


class MemoryLoader:
    """Iterable over (images uint8 (m, 3, 32, 32), labels int64 (m,)), in the given order; see `Split` for the labels.

    The images are not copied into the process unless another `device` than the CPU is given, where they then stay.
    """

    def __init__(self, split: Split, order: Order, device: torch.device | str = "cpu") -> None:
        self.batch_sampler = order
        """The order, under the name where Lightning and DeepSpeed look for the batch size."""
        self.sampler = order.sampler
        """Lightning calls its `set_epoch` before each training epoch."""
        self._images = _as_tensor(split).to(device)
        self._indices = torch.from_numpy(split.indices)
        self._labels = torch.from_numpy(split.labels)
        self._given = 0

    def __len__(self) -> int:
        """Micro-batches in an epoch."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch: its index table is made first, and then each micro-batch is a single gather."""
        positions = self.batch_sampler.positions()
        rows = self._indices[positions].to(self._images.device)
        labels = self._labels[positions].to(self._images.device)
        for batch in range(self._given, len(positions)):
            self._given = (batch + 1) % len(positions)
            yield self._images.index_select(0, rows[batch]), labels[batch]

    def state_dict(self) -> dict[str, int]:
        """The place in the epoch, which Lightning keeps in a checkpoint: micro-batches given so far, 0 at its end."""
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the next epoch begin where another loader was."""
        self._given = state["given"]


def _as_tensor(split: Split) -> Tensor:
    with warnings.catch_warnings():
        # The map is read-only, so that no rank can spoil the others' images; nothing here writes to it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(split.images)
