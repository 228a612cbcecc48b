"""Code as users write it: models, LightningModules with features that are difficult for strategies, and their data."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from typing import ClassVar
from weakref import WeakSet

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split


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


class Named(Small):
    """has an argument that every model has already"""

    def __init__(self, num_classes: int, name: str = "small"):
        super().__init__(num_classes)


def seven_scores() -> nn.Module:
    return Small(7)


class Digits(LightningModule):
    """Extends Lightning's MNIST example by dropout, batch norm, an LSTM over the rows, and a frozen layer. Fails at the
    start of a training that Ctrl-C would not reach."""

    def __init__(
        self,
        lr: float = 0.01,
        manual: bool = False,
        optimizers: int = 1,
        norm: type[nn.Module] = nn.BatchNorm1d,
    ):
        super().__init__()
        self.save_hyperparameters(ignore="norm")
        self.automatic_optimization = not manual
        self.frozen = nn.Linear(8, 16).requires_grad_(False)
        self.rows = nn.LSTM(16, 12, batch_first=True)
        self.norm = norm(12)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(12, 10))

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.rows(self.frozen(images))
        return self.head(self.norm(states[:, -1]))

    def on_train_start(self) -> None:
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "Ctrl-C is blocked"

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.hparams["lr"])
        if (count := self.hparams["optimizers"]) > 1:
            return [optimizer] * count
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class DigitsData(LightningDataModule):
    """Provides random images with labels. Both the split in `setup` and the shuffling draw from torch's global random
    state."""

    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        images, labels = torch.randn(144, 8, 8, generator=generator), torch.randint(0, 10, (144,), generator=generator)
        self.train, self.val = random_split(TensorDataset(images, labels), [128, 16])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class Stream(IterableDataset):
    """Provides images in a data set without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))


class Alone(BoringModel):
    """Trains Lightning's smallest demo on a stream of images. Fails at the start of a training if a module of an
    earlier training is still in memory."""

    alive: ClassVar[WeakSet[Alone]] = WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self.alive.add(self)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Stream())

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
