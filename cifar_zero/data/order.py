"""Which image comes when: the order that both loaders follow, on every rank.

An order is a table of positions in a split, one row per micro-batch. Both orders here can serve as the batch sampler of
a torch DataLoader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cifar_zero.config.batch import micro_batch_size
from cifar_zero.core.errors import UsageError


class TrainOrder:
    """A new shuffle each epoch: that of torch's DistributedSampler (drop_last), rank r taking r, r + world_size, ...

    Only whole optimizer steps are given, floor(count / batch_size) an epoch: DeepSpeed counts micro-batches up to the
    next step by itself and would carry a remainder into the next epoch, where DDP steps at the epoch's end. As the
    ranks take turns, step k sees the same set of images at every number of ranks and every accumulation.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        accumulate: int,
        world_size: int,
        rank: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        """`count` images; `batch_size` of one optimizer step over all ranks, in `accumulate` micro-batches per rank.
        Without `shuffle` every epoch has the stored order.

        Raises UsageError where the batch does not divide, or is larger than the split.
        """
        self.batch_size = micro_batch_size(batch_size, world_size, accumulate)
        """Images in a micro-batch of this rank; this is the name that a batch sampler has for it."""
        self.epoch = 0
        """The epoch whose order is given, from 0."""
        self.skipped = 0
        """Micro-batches at its beginning that the next pass of a DataLoader leaves out."""
        self._count, self._world_size, self._rank, self._seed, self._shuffle = count, world_size, rank, seed, shuffle
        self._length = count // batch_size * accumulate
        if self._length == 0:
            raise UsageError(f"batch_size {batch_size} is more than the {count} training images: use a smaller one")

    @property
    def sampler(self) -> TrainOrder:
        """Itself, under the name where Lightning looks for a `set_epoch` to call before each epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass that of `epoch`."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Micro-batches in an epoch."""
        return self._length

    def positions(self) -> Tensor:
        """This epoch's positions, int64 (micro-batches, batch_size)."""
        if self._shuffle:  # seeded as DistributedSampler does it
            turns = torch.randperm(self._count, generator=torch.Generator().manual_seed(self._seed + self.epoch))
        else:
            turns = torch.arange(self._count)
        mine = turns[self._rank :: self._world_size]
        return mine[: self._length * self.batch_size].view(self._length, self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Micro-batches of positions, for a DataLoader."""
        return iter(self.positions()[self.skipped :].tolist())


class EvalOrder:
    """Every image once, unshuffled: rank r takes positions r, r + world_size, ...

    Each rank gets as many batches of the same size, as ZeRO-3 gathers weights in every forward and would hang where one
    rank makes more. What is lacking is filled with position `count`, the split's ignored entry.
    """

    epoch = skipped = 0
    """All passes are the same, and whole."""

    sampler = None
    """There is nothing to shuffle; Lightning asks for the attribute."""

    def __init__(self, count: int, max_batch_size: int, world_size: int, rank: int) -> None:
        """`count` >= 1 images in as few batches of at most `max_batch_size` per rank as can be, of even size."""
        per_rank = math.ceil(count / world_size)
        self._length = math.ceil(per_rank / max_batch_size)
        self.batch_size = math.ceil(per_rank / self._length)
        self._count, self._world_size, self._rank = count, world_size, rank

    def __len__(self) -> int:
        """Batches of a pass."""
        return self._length

    def positions(self) -> Tensor:
        """Positions, int64 (batches, batch_size); `count` stands for an entry to be ignored."""
        turns = torch.arange(self._length * self.batch_size).view(self._length, self.batch_size)
        return (self._rank + self._world_size * turns).clamp_(max=self._count)

    def __iter__(self) -> Iterator[list[int]]:
        """Batches of positions, for a DataLoader."""
        return iter(self.positions().tolist())


Order = TrainOrder | EvalOrder
