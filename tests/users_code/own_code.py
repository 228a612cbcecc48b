"""Code as users write it: models, LightningModules with features that are difficult for strategies, and their data."""

import gc
from collections.abc import Iterator
from typing import ClassVar
from weakref import WeakSet

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset


class Small(nn.Module):
    """a convolution and a linear layer"""

    def __init__(
        self,
        num_classes: int,
        width: int = 4,
        broken: bool = False,
        dim: int = -1,
        bias: bool | None = None,
        activation: type[nn.Module] = nn.ReLU,
    ):
        super().__init__()
        self.broken, self.dim, self.activation = broken, dim, activation()
        self.conv = nn.Conv2d(3, width, 3, stride=2)
        self.head = nn.Linear(width * 15 * 15, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        if self.broken:
            raise RuntimeError("no good")
        if not images.isfinite().all():  # torch's meta device cannot evaluate this
            raise ValueError("no finite images")
        return self.head(self.activation(self.conv(images)).flatten(1, self.dim))


class Counted(Small):
    """has a number of blocks, and no blocks of this name"""

    blocks = 2

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.conv(images).flatten(1))


class Indexed(Small):
    """takes its blocks by index"""

    def __init__(self, num_classes: int, width: int = 4):
        super().__init__(num_classes, width)
        self.blocks = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(5)))

    def forward(self, images: Tensor) -> Tensor:
        for number in range(5):
            images = self.blocks[number](images)
        return self.head(self.conv(images).flatten(1))


class Named(Small):
    """has an argument that every model has already"""

    def __init__(self, num_classes: int, name: str = "small"):
        super().__init__(num_classes)


def seven_scores() -> nn.Module:
    return Small(7)


seven_scores.__doc__ = " "


class Stream(IterableDataset):
    """Provides images in a data set without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))


class StreamData(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Stream())


class Alone(BoringModel):
    """Extends Lightning's smallest demo. Fails at the start of a training if an earlier module is still in memory."""

    alive: ClassVar[WeakSet["Alone"]] = WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self.alive.add(self)

    def on_train_start(self) -> None:
        gc.collect()
        assert len(self.alive) == 1, f"{len(self.alive) - 1} earlier modules are still in memory"


def warmer(images: Tensor) -> Tensor:
    """Shifts the colours of all images of a call by the same random number."""
    return (images.int() + torch.randint(0, 20, (1,))).clamp(0, 255).byte()


def brightest(images: Tensor) -> Tensor:
    return images + (255 - images.max())


def grey(images: Tensor) -> Tensor:
    return images[:, :1]


def from_0_to_1(images: Tensor) -> Tensor:
    return images / 255
