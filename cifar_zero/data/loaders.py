"""Defines the loaders of --data.loader. The memory loader cuts micro-batches from blocks of images, and runs Python
code per image only for images on the disk. The torch loader applies the PyTorch tutorial's transforms image by image,
in a DataLoader with worker processes."""

import math
import mmap
import signal
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
from cifar_zero.core import exits
from cifar_zero.core.errors import FEWER_WORKERS, KILLED_WORKER, RunError
from cifar_zero.data.augment import Augmentation, memory_format
from cifar_zero.data.dataset import Order, Split, map_beyond_memory
from cifar_zero.data.draws import Draws

BLOCK_IMAGES = {"cpu": 128, "cuda": 8192}
"""Number of images that are gathered, augmented and normalised at once, by type of device. It is rounded up to whole
micro-batches. Blocks of images with more than 32 x 32 pixels have fewer images.

The CPU's number was measured on one core of an AMD EPYC with 1 MB of second-level cache, with torch 2.15: blocks of 128
and of 256 images are about equally fast, and smaller and larger ones slower. The GPU's number was not measured. Its
8,192 images of 32 x 32 pixels take 100 MB in float32.
"""

GROUPED_BLOCK_IMAGES = {"cpu": 2048, "cuda": 16384}
"""Replaces BLOCK_IMAGES if the augmentation has a policy or the user's transform. In each block, these are called once
for each group of images (see `draws.GROUPS`)."""

STRETCH_BLOCKS = 64
"""Number of blocks for which the positions, labels and draws of an epoch are looked up at once: large enough that a GPU
does not wait for the copies, and small enough that an epoch starts without delay."""

RESIDENT_SHARE = 1 / 4
"""Largest share of a GPU's free memory that stored images may take, before the model's memory is allocated."""


class ImageStore:
    """Stores images uint8 (N, H, W, 3) for batches on a device: on the GPU if they take at most RESIDENT_SHARE of its
    free memory, else on the host. For devices other than GPUs, the batches stay on the CPU. `take` needs row numbers on
    `rows_device` and returns blocks on `device`."""

    def __init__(self, images: NDArray[np.uint8], device: torch.device | str) -> None:
        with warnings.catch_warnings():
            # The map is read-only to protect the other ranks' images; nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
            self._images = torch.from_numpy(images)
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
        self._start = getattr(images, "offset", 0)  # offset of the first image in the map, in bytes

    def take(self, rows: Tensor) -> Tensor:
        """Returns the images uint8 (n, H, W, 3) in the rows int64 (n,)."""
        if self._map is not None:  # reads all rows at once, whereas `index_select` waits for each page
            size = self._images[0].nbytes
            for start in (self._start + rows * size).tolist():
                page = start - start % mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, page, start + size - page)
        block = self._images.index_select(0, rows)
        if self.rows_device.type == self.device.type:
            return block
        # The copy from pinned memory is only queued, so the host gathers the next block while the GPU works. torch
        # reuses pinned memory only after the copies that are queued from it.
        return block.pin_memory().to(self.device, non_blocking=True)


class Resumable:
    """Tracks a loader's position in its epoch, for Lightning's checkpoints."""

    batch_sampler: Order  # the order, under the name from which Lightning and DeepSpeed read the batch size
    _yielded = 0  # micro-batches yielded in this epoch so far; 0 at its end
    _resumed: Mapping[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        """Returns the epoch and how many of its micro-batches were yielded, which Lightning saves in a checkpoint."""
        return {"epoch": self.batch_sampler.epoch, "given": self._yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the next pass continue at the saved position if it is a pass over the saved epoch."""
        self._resumed = state

    def _begin(self) -> int:
        """Starts a pass and returns the number of micro-batches to skip. The epoch must already be set."""
        self._yielded = 0
        if self._resumed.get("epoch") == self.batch_sampler.epoch:
            self._yielded = self._resumed["given"]
        self._resumed = {}
        return self._yielded

    def _count(self) -> None:
        self._yielded = (self._yielded + 1) % len(self.batch_sampler)


class MemoryLoader(Resumable):
    """Yields (images, labels) in the order of `order`, on the device of `stored`.

    Images are float32 (m, 3, H, W), normalised, in `memory_format`. Labels are int64 (m,) as in `Split`, or float32 (m,
    classes) with mixup or cutmix. Several micro-batches are views of one block.

    Args:
        stored: all stored images of `split`, by default on the CPU.
        augmentation: by default, images are only normalised to [-1, 1].
    """

    def __init__(
        self,
        split: Split,
        order: Order,
        stored: ImageStore | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.batch_sampler = order
        self.sampler = order.sampler  # Lightning calls its `set_epoch` before each training epoch
        self._stored = stored or ImageStore(split.images, "cpu")
        self._indices = torch.from_numpy(split.indices)
        self._labels = torch.from_numpy(split.labels)
        self._augmentation = augmentation or Augmentation(AugmentConfig(), split.count, 0, 0)
        self._format = memory_format(self._stored.device)
        block_images = GROUPED_BLOCK_IMAGES if self._augmentation.transforms else BLOCK_IMAGES
        images = self._augmentation.inputs.batch_size_of_equal_pixels(block_images[self._stored.device.type])
        self._block = math.ceil(images / order.batch_size)  # micro-batches in a block

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the micro-batches of an epoch, or only the remaining ones if a state within this epoch was loaded."""
        self._begin()
        size = self.batch_sampler.batch_size
        for rows, labels, draws in self._plan():
            images, labels = self._augmentation.apply(self._stored.take(rows), labels, draws)
            images = images.permute(0, 3, 1, 2).contiguous(memory_format=self._format)
            for batch in zip(images.split(size), labels.split(size), strict=True):
                self._count()
                yield batch

    def _plan(self) -> Iterator[tuple[Tensor, Tensor, Draws]]:
        """Yields, for each block, the rows of the stored images, the labels and the draws. With mixing, the entries of
        the partners follow those of the images that they are mixed into."""
        device, rows_device = self._stored.device, self._stored.rows_device
        table = self._augmentation.draw(self.batch_sampler.epoch)
        for stretch in self.batch_sampler.positions()[self._yielded :].split(self._block * STRETCH_BLOCKS):
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
    """A split's images and labels. An image is float32 (3, H, W), as the PyTorch tutorial transforms it (ToTensor, then
    Normalize)."""

    def __init__(self, split: Split, inputs: Inputs) -> None:
        self._split = split
        map_beyond_memory(split.images)
        self._transform: Callable[[Image.Image], Tensor] = Compose([ToTensor(), Normalize(inputs.mean, inputs.std)])

    def __len__(self) -> int:
        return self._split.count

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        pixels = self._split.images[self._split.indices[position]]
        return self._transform(Image.fromarray(pixels)), int(self._split.labels[position])


def _ignore_requests(worker: int) -> None:
    """Ignores the signals that ask a training to stop, which a terminal and SLURM send to workers too. SIGTERM keeps
    torch's handler, because torch ends workers with it."""
    for number in {*exits.SIGNALS, exits.SLURM_REQUEUE} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)


class TorchLoader(Resumable, DataLoader[Any]):
    """A DataLoader that can continue in the middle of an epoch. It yields (images float32 (m, 3, H, W), labels int64
    (m,)). It reads the order only at the first batch, because Lightning (2.6.6) creates the iterator of a resumed run
    before it sets the epoch."""

    batch_sampler: Order

    def __init__(self, split: Split, order: Order, workers: int, inputs: Inputs = PLAIN, pin: bool = False) -> None:
        # DataLoader would draw from the global generator by default, and dropout would then differ from a run with the
        # memory loader.
        options: Any = {"num_workers": workers, "persistent_workers": workers > 0, "generator": torch.Generator()}
        options["worker_init_fn"] = _ignore_requests
        # Batches are in pinned memory, so that the host does not wait for the copy to a GPU.
        super().__init__(TransformedImages(split, inputs), batch_sampler=order, pin_memory=pin, **options)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yields the micro-batches of an epoch, or only the remaining ones if a state within this epoch was loaded.
        Raises RunError if a worker process was killed."""
        self.batch_sampler.skipped = self._begin()
        try:
            for batch in super().__iter__():
                self._count()
                yield batch
        except ConnectionError as error:
            # A batch's tensors come from its worker; torch (2.15) does not report that the worker was killed meanwhile.
            raise RunError(f"{KILLED_WORKER}; {FEWER_WORKERS}") from error
