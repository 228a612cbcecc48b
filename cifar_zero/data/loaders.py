"""The loaders of --data.loader. memory: micro-batches cut from blocks of images that a GPU or the host stores, without
Python per image unless it has to come from the disk. torch: the PyTorch tutorial's transforms, image by image, in a
DataLoader with worker processes."""

import math
import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Compose, Normalize, ToTensor

from cifar_zero.config.recipe import PLAIN, AugmentConfig, Inputs
from cifar_zero.core.errors import FEWER_WORKERS, KILLED_WORKER, RunError
from cifar_zero.data.augment import Augmentation, memory_format
from cifar_zero.data.dataset import Order, Split, map_beyond_memory
from cifar_zero.data.draws import Draws

BLOCK_IMAGES = {"cpu": 128, "cuda": 1024}
"""Images that are gathered, augmented and normalised at once, rounded up to whole micro-batches, by type of device;
fewer if they have more than 32 x 32 pixels.

Measured on one core of an AMD EPYC with 1 MB of second-level cache, torch 2.15: 128 and 256 images are about equal;
fewer cost more for calling each operation, more cost more for memory. On a GPU: not measured.
"""

GROUPED_BLOCK = 16
"""How much larger a block is with a policy or the user's transform, which is called once for each of its groups."""

STRETCH_BLOCKS = 64
"""Blocks that are looked up at once in the tables of an epoch: enough that a GPU does not wait for the copies, and few
enough that an epoch starts without delay."""

RESIDENT_SHARE = 1 / 4
"""Share of a GPU's free memory for stored images: the model's is allocated later. CIFAR-10 takes 184 MB."""


class Stored:
    """Stored images (N, 3, H, W), uint8, for batches on a device. On a GPU if they take at most RESIDENT_SHARE of its
    free memory, else on the host. For devices other than GPUs the batches stay on the CPU. `take` returns blocks on
    `device`, and its row numbers have to be on `rows_device`."""

    def __init__(self, images: NDArray[np.uint8], device: torch.device | str) -> None:
        with warnings.catch_warnings():
            # The map is read-only to protect the other ranks' images; nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
            self._images = torch.from_numpy(images.transpose(0, 2, 3, 1))
        self.device = torch.device("cpu")
        if torch.device(device).type == "cuda":
            self.device = torch.device(device)
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            if self._images.nbytes <= free_bytes * RESIDENT_SHARE:
                self._images = self._images.to(self.device)
        self.rows_device = self._images.device
        self._map = None
        if self.rows_device.type == "cpu":
            self._map = map_beyond_memory(images)
        self._start = getattr(images, "offset", 0)  # of the first image in the map, in bytes

    def take(self, rows: Tensor) -> Tensor:
        """Returns the images at row numbers int64 (n,): uint8 (n, H, W, 3)."""
        if self._map is not None:  # the disk reads them at once; `index_select` waits for one page after another
            size = self._images[0].nbytes
            for start in (self._start + rows * size).tolist():
                page = start - start % mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, page, start + size - page)
        block = self._images.index_select(0, rows)
        if self.rows_device.type == self.device.type:
            return block
        # From pinned memory the copy is queued, and the host gathers the next block while the GPU works. torch reuses
        # pinned memory only after the copies queued from it.
        return block.pin_memory().to(self.device, non_blocking=True)


class Resumable:
    """Tracks a loader's position in its epoch, for Lightning's checkpoints."""

    batch_sampler: Order  # the order, under the name where Lightning and DeepSpeed look for the batch size
    _given = 0  # micro-batches that this epoch has given so far; 0 at its end
    _resumed: Mapping[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        """Returns what Lightning saves in a checkpoint: the epoch and the micro-batches given in it so far."""
        return {"epoch": self.batch_sampler.epoch, "given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the next pass continue where another loader was, if the epoch is the same."""
        self._resumed = state

    def _begin(self) -> int:
        """Starts a pass, whose epoch is known by now; returns the number of micro-batches to skip."""
        self._given = 0
        if self._resumed.get("epoch") == self.batch_sampler.epoch:
            self._given = self._resumed["given"]
        self._resumed = {}
        return self._given

    def _count(self) -> None:
        """Counts a micro-batch, just before it is given."""
        self._given = (self._given + 1) % len(self.batch_sampler)


class MemoryLoader(Resumable):
    """Iterable over (images, labels) in the given order, on the device.

    Images are float32 (m, 3, H, W), normalised, in `memory_format`; labels int64 (m,), see `Split`, or with mixup or
    cutmix float32 (m, classes). Several micro-batches are made at once, as views of one block. `stored` are the split's
    images on a device, by default on the CPU; without an augmentation they are normalised to [-1, 1].
    """

    def __init__(
        self,
        split: Split,
        order: Order,
        stored: Stored | None = None,
        augmentation: Augmentation | None = None,
        channels_last: bool = False,
    ) -> None:
        self.batch_sampler = order
        self.sampler = order.sampler  # Lightning calls its `set_epoch` before each training epoch
        self._stored = stored or Stored(split.images, "cpu")
        self._indices = torch.from_numpy(split.indices)
        self._labels = torch.from_numpy(split.labels)
        self._augmentation = augmentation or Augmentation(AugmentConfig(), split.count, 0, 0)
        self._format = memory_format(self._stored.device, channels_last)
        images = self._augmentation.inputs.as_many(BLOCK_IMAGES[self._stored.device.type])
        if self._augmentation.transforms:
            images *= GROUPED_BLOCK
        self._block = math.ceil(images / order.batch_size)  # micro-batches in a block

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields an epoch, or its rest if the loader whose state was loaded has begun it."""
        self._begin()
        size = self.batch_sampler.batch_size
        for rows, labels, draws in self._plan():
            images, labels = self._augmentation.apply(self._stored.take(rows), labels, draws)
            images = images.permute(0, 3, 1, 2).contiguous(memory_format=self._format)
            for batch in zip(images.split(size), labels.split(size), strict=True):
                self._count()
                yield batch

    def _plan(self) -> Iterator[tuple[Tensor, Tensor, Draws]]:
        """Yields the stored rows, labels and draws of each block, those of mixed-in partners after its own."""
        device, rows_device = self._stored.device, self._stored.rows_device
        table = self._augmentation.draw(self.batch_sampler.epoch)
        for stretch in self.batch_sampler.positions()[self._given :].split(self._block * STRETCH_BLOCKS):
            positions = stretch[None]  # (1, micro-batches, m)
            if table.partner is not None:
                positions = torch.cat([positions, table.partner[positions]])  # (2, micro-batches, m)
            rows = self._indices.take(positions).to(rows_device)
            labels = self._labels.take(positions).to(device)
            draws = table.each(lambda column, at=positions: column[at])
            draws = draws.each(lambda column: column.to(device))._replace(group=draws.group)
            for start in range(0, len(stretch), self._block):
                block = slice(start, start + self._block)
                yield (
                    rows[:, block].flatten(),
                    labels[:, block].flatten(),
                    draws.each(lambda column, at=block: column[:, at].flatten(0, 2)),
                )


class TransformedImages(Dataset[tuple[Tensor, int]]):
    """A split's images one by one, after the tutorial's transforms: float32 (3, H, W), normalised."""

    def __init__(self, split: Split, inputs: Inputs) -> None:
        self._split = split
        map_beyond_memory(split.images)
        self._transform: Callable[[Image.Image], Tensor] = Compose([ToTensor(), Normalize(inputs.mean, inputs.std)])

    def __len__(self) -> int:
        return self._split.count

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        pixels = self._split.images[self._split.indices[position]]
        image = Image.fromarray(pixels.transpose(1, 2, 0))
        return self._transform(image), int(self._split.labels[position])


class TorchLoader(Resumable, DataLoader[Any]):
    """A DataLoader that can continue in the middle of an epoch, and looks up the order at the first batch.

    Lightning (2.6.6) asks for the iterator of a resumed run before it sets the epoch: DataLoader's own iterator would
    look up the order too early. Yields (images float32 (m, 3, H, W), labels int64 (m,)).
    """

    batch_sampler: Order

    def __init__(self, split: Split, order: Order, workers: int, inputs: Inputs = PLAIN, pin: bool = False) -> None:
        # Not the global generator: dropout would differ from that with the memory loader.
        options: Any = {"num_workers": workers, "persistent_workers": workers > 0, "generator": torch.Generator()}
        # Pinned, so that the host does not wait for the copy to a GPU.
        super().__init__(TransformedImages(split, inputs), batch_sampler=order, pin_memory=pin, **options)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yields an epoch, or its rest if the loader whose state was loaded has begun it."""
        self.batch_sampler.skipped = self._begin()
        try:
            for batch in super().__iter__():
                self._count()
                yield batch
        except ConnectionError as error:
            # A batch's tensors come from its worker; torch (2.15) does not say that the worker was killed meanwhile.
            raise RunError(f"{KILLED_WORKER}; {FEWER_WORKERS}") from error
