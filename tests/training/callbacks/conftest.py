"""Provides the tests of callbacks with a real fit on random images, which uses the loop and the loader that users get,
and with the TensorBoard curves of this fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from cifar_module import CIFARModule
from cifar_zero.config.settings import Settings
from cifar_zero.data.dataset import Split, TrainOrder
from cifar_zero.data.loaders import MemoryLoader
from cifar_zero.training import fast_loop
from cifar_zero.training.callbacks.curves import TrainingCurves
from cifar_zero.training.callbacks.engine import EngineInfo
from cifar_zero.training.callbacks.throughput import ProgressLines, Throughput, training_flops

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NUM_TEST = 60


Change = Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]
"""A function with which a test changes each micro-batch (images, labels)."""


class ChangedLoader(MemoryLoader):
    """Extends the memory loader, and applies `change` to each micro-batch."""

    change: Change

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return map(self.change, super().__iter__())


class RandomImages(LightningDataModule):
    """Provides random images, with the interface of CIFARDataModule that callbacks use. The last test label is
    padding."""

    classes = CLASSES
    dataset = SimpleNamespace(name="synthetic")
    num_test = NUM_TEST

    def __init__(self, num_train: int, batch_size: int, accumulate: int, change: Change | None = None):
        super().__init__()
        self.num_train = num_train
        self.order, self.change = TrainOrder(num_train, batch_size, accumulate, 1, 0, 0, shuffle=False), change
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (num_train, 32, 32, 3), generator=generator, dtype=torch.uint8).permute(
            0, 3, 1, 2
        )
        labels = torch.randint(0, 10, (num_train,), generator=generator)
        self.split = Split(images.numpy(), labels.numpy(), np.arange(num_train))
        self.test_images = torch.randint(0, 256, (NUM_TEST + 1, 3, 32, 32), generator=generator, dtype=torch.uint8)
        self.test_labels = torch.randint(0, 10, (NUM_TEST + 1,), generator=generator)
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
    """Returns a function that trains a configuration on `num_train` images, on the CPU in this process."""

    def run(
        settings: Settings,
        num_train: int,
        *more_callbacks: Callback,
        warmup_steps: int = 2,
        module_class: type[CIFARModule] = CIFARModule,
        change: Change | None = None,
        **options: Any,
    ) -> Run:
        folder = tmp_path / f"run_{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        curves = TrainingCurves()
        flops = training_flops(settings.recipe, len(CLASSES), settings.recipe.batch_size)
        settings = settings.changed(warmup_steps=warmup_steps)
        throughput = Throughput(settings, flops)
        observers = [curves, EngineInfo(), throughput, ProgressLines(curves, throughput)]
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=settings.recipe.epochs,
            max_steps=settings.recipe.max_steps,
            accumulate_grad_batches=settings.placement.accumulate,
            gradient_clip_val=settings.recipe.gradient_clip_val or None,
            logger=TensorBoardLogger(tmp_path, name=folder.name, version="", default_hp_metric=False),
            callbacks=[*observers, *more_callbacks],
            log_every_n_steps=settings.output.log_interval,
            default_root_dir=folder,
            use_distributed_sampler=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **{"enable_checkpointing": False, "enable_progress_bar": False, **options},
        )
        module = module_class(settings, len(CLASSES))
        datamodule = RandomImages(num_train, settings.recipe.batch_size, settings.placement.accumulate, change)
        fast_loop.install(trainer)
        trainer.fit(module, datamodule=datamodule)
        return Run(trainer, module, datamodule, folder, EventAccumulator(str(folder)).Reload())

    return run
