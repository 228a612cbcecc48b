"""Selects the images of a split that a loader reads, and the order in which each replica of the model reads them. A
replica is one rank, or all ranks that share one model."""

import math
import mmap
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cifar_zero.config.run import micro_batch_size
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import free_memory_bytes

IGNORED = -1  # label of an entry that only pads a batch; losses and metrics do not count it

MAPPED_SHARE = 0.9  # mapped images stay in memory up to this share of the free memory; a model needs some too


def map_beyond_memory(images: NDArray[np.uint8]) -> mmap.mmap | None:
    """Turns off read-ahead for memory-mapped images that are too many to stay in memory, and returns their memory map,
    or None for other images. By default, the kernel reads 128 kB or more around an image, and these pages leave memory
    before they are used."""
    pages: mmap.mmap | None = getattr(images, "_mmap", None)
    if pages is None or images.nbytes <= free_memory_bytes() * MAPPED_SHARE:
        return None
    pages.madvise(mmap.MADV_RANDOM)
    return pages


class Split:
    """A subset of the stored images, addressed by position from 0 to count - 1. Position `count` repeats the first
    image, with the label IGNORED.

    Args:
        images: all stored images (N, H, W, 3).
        labels: all stored labels (N,).
        indices: rows of the split's images (n,), with n at least 1.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64], indices: NDArray[np.int64]) -> None:
        self.images = images
        self.indices = np.append(indices, indices[0])  # row of `images` at each position, (count + 1,)
        self.labels = np.append(labels[indices], IGNORED)  # label at each position, (count + 1,)
        self.count = len(indices)  # without the ignored one


def stratified_split(
    labels: NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns sorted indices (train, held out) into `labels` (N,), int64. The share `fraction` of each class is held
    out at random, rounded to whole images, but at least one image of each class stays in train."""
    rng = np.random.default_rng(seed)
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        held_out[members[: min(round(fraction * len(members)), len(members) - 1)]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


class Order:
    """Determines which images each micro-batch of an epoch has on one replica, and in which order, by positions in the
    split."""

    epoch = 0  # the current epoch
    skipped = 0  # micro-batches that the next pass of a DataLoader skips
    sampler: "TrainOrder | None" = None  # Lightning calls its `set_epoch` before each epoch

    def __init__(self, count: int, batch_size: int, length: int, replicas: int, replica: int) -> None:
        self.batch_size = batch_size  # images in a micro-batch of this replica, by the name that batch samplers use
        self._count, self._length, self._replicas, self._replica = count, length, replicas, replica

    def __len__(self) -> int:
        return self._length

    def positions(self) -> Tensor:
        """Returns this epoch's positions in the split, int64 (micro-batches, batch_size)."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.positions()[self.skipped :].tolist())


class TrainOrder(Order):
    """Shuffles the images in each epoch, like torch's DistributedSampler with drop_last. Replica r takes the shuffled
    images r, r + replicas, r + 2 * replicas and so on.

    An epoch has floor(count / batch_size) optimizer steps. The remaining images are left out, because DeepSpeed would
    complete their step with images of the next epoch, whereas DDP would step at the end of the epoch. Step k sees the
    same set of images for every number of replicas and every accumulation. Raises UsageError if the batch size cannot
    be divided into micro-batches, or is more than the number of images.

    Args:
        batch_size: images of one optimizer step over all replicas, in `accumulate` micro-batches per replica.
        shuffle: whether to shuffle; if not, every epoch has the stored order.
    """

    def __init__(
        self, count: int, batch_size: int, accumulate: int, replicas: int, replica: int, seed: int, shuffle: bool = True
    ) -> None:
        micro_batch = micro_batch_size(batch_size, replicas, accumulate)
        length = count // batch_size * accumulate
        super().__init__(count, micro_batch, length, replicas, replica)
        if length == 0:
            raise UsageError(f"--batch_size {batch_size} is more than the {count} training images: use a smaller one")
        self._seed, self._shuffle, self.sampler = seed, shuffle, self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def positions(self) -> Tensor:
        if self._shuffle:  # seeded like DistributedSampler
            turns = torch.randperm(self._count, generator=torch.Generator().manual_seed(self._seed + self.epoch))
        else:
            turns = torch.arange(self._count)
        mine = turns[self._replica :: self._replicas]
        return mine[: self._length * self.batch_size].view(self._length, self.batch_size)


class EvalOrder(Order):
    """Reads every image once over all replicas, in the stored order. Replica r takes the positions r, r + replicas, r +
    2 * replicas and so on.

    All replicas get the same number of batches of the same size, because ZeRO 3 gathers weights in every forward pass
    and would hang if one rank had more batches. Missing images are padded with position `count`, the split's ignored
    entry. There are as few batches as `max_batch_size` images per replica allow.
    """

    def __init__(self, count: int, max_batch_size: int, replicas: int, replica: int) -> None:
        per_replica = math.ceil(count / replicas)
        length = math.ceil(per_replica / max_batch_size)
        super().__init__(count, math.ceil(per_replica / length), length, replicas, replica)

    def positions(self) -> Tensor:
        turns = torch.arange(self._length * self.batch_size).view(self._length, self.batch_size)
        return (self._replica + self._replicas * turns).clamp_(max=self._count)
