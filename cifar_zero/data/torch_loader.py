"""The torch loader: the PyTorch tutorial's transforms, image by image, and a DataLoader with worker processes."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Compose, Normalize, ToTensor

from cifar_zero.config.recipe import PLAIN, Inputs
from cifar_zero.core.errors import FEWER_WORKERS, KILLED_WORKER, RunError
from cifar_zero.data.dataset import Order, Split, map_beyond_memory
from cifar_zero.data.memory_loader import Resumable


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
