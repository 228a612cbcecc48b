"""Provides the tests of the training with a real fit on random images, which uses the Trainer and the loader that users
get, and with the TensorBoard curves of this fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from cifar_module import CIFARModule
from cifar_zero.config.settings import Settings
from cifar_zero.data.classes import CLASSES
from cifar_zero.data.dataset import Split, TrainOrder
from cifar_zero.data.loaders import MemoryLoader
from cifar_zero.training import build
from cifar_zero.training.callbacks.curves import TrainingCurves
from cifar_zero.training.callbacks.engine import EngineInfo
from cifar_zero.training.callbacks.throughput import ProgressLines, Throughput, training_flops
from cifar_zero.training.resolve import make_run

Change = Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]
"""A function with which a test changes each micro-batch (images, labels)."""


class ChangedLoader(MemoryLoader):
    """Extends the memory loader, and applies `change` to each micro-batch."""

    change: Change

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return map(self.change, super().__iter__())


class RandomImages(LightningDataModule):
    """Provides random images, with the interface of CIFARDataModule that callbacks use. The last of 61 test images is
    padding."""

    classes = CLASSES["cifar10"]
    dataset = SimpleNamespace(identity={})

    def __init__(self, num_train: int, batch_size: int, accumulate: int, change: Change | None = None):
        super().__init__()
        self.order, self.change = TrainOrder(num_train, batch_size, accumulate, 1, 0, 0, shuffle=False), change
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (num_train, 3, 32, 32), generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, 10, (num_train,), generator=generator)
        self.split = Split(images.permute(0, 2, 3, 1).numpy(), labels.numpy(), np.arange(num_train))
        self.test_images = torch.randint(0, 256, (61, 3, 32, 32), generator=generator, dtype=torch.uint8)
        self.test_labels = torch.randint(0, 10, (61,), generator=generator)
        self.test_labels[-1] = -1

    def train_dataloader(self) -> MemoryLoader:
        loader = ChangedLoader(self.split, self.order)
        loader.change = self.change or (lambda batch: batch)
        return loader

    def val_dataloader(self) -> DataLoader[Any]:
        return self.test_dataloader()

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.test_images, self.test_labels), 25)


@dataclass
class Run:
    """A finished fit."""

    trainer: Trainer
    module: CIFARModule
    datamodule: RandomImages
    folder: Path
    events: EventAccumulator  # of TensorBoard

    def points(self, tag: str) -> dict[int, float]:
        """Returns the values of a curve by step."""
        points = [(event.step, event.value) for event in self.events.Scalars(tag)]
        assert len(points) == len(dict(points)), f"{tag} has two points at one step"
        return dict(points)

    def observer(self, kind: type[Any]) -> Any:
        """Returns the trainer's callback of a class."""
        callbacks = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        return next(callback for callback in callbacks if isinstance(callback, kind))


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Run]:
    """Returns a function that trains a configuration on `num_train` images, on the CPU in this process. Further options
    are options of Lightning's Trainer."""

    def run(
        settings: Settings,
        num_train: int,
        *more_callbacks: Callback,
        warmup_steps: int = 2,
        module_class: type[CIFARModule] = CIFARModule,
        change: Change | None = None,
        ckpt_path: Path | None = None,
        **options: Any,
    ) -> Run:
        folder = tmp_path / f"run_{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        options = {"enable_checkpointing": False, **options}
        where = {"accelerator": "cpu", "devices": 1}
        resolved = make_run(settings.changed(**where, warmup_steps=warmup_steps, trainer=options))
        curves = TrainingCurves()
        throughput = Throughput(
            resolved, training_flops(resolved.recipe, resolved.num_classes, resolved.recipe.batch_size)
        )
        observers = [curves, EngineInfo(), throughput, ProgressLines(curves, throughput)]
        if any(isinstance(callback, TrainingCurves) for callback in more_callbacks):  # a Trainer accepts only one
            observers = []
        trainer = build.trainer(resolved, folder, [*observers, *more_callbacks])
        module = module_class(resolved, resolved.num_classes)
        datamodule = RandomImages(num_train, resolved.recipe.batch_size, resolved.placement.accumulate, change)
        trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
        return Run(trainer, module, datamodule, folder, EventAccumulator(str(folder)).Reload())

    return run
