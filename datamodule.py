"""CIFARDataModule: brings a source to the trainer, the same images in the same order under every strategy."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray

from cifar_zero import data
from cifar_zero.config.batch import micro_batch_size
from cifar_zero.config.flags import AugmentConfig, DataConfig, SourceName
from cifar_zero.core.errors import UsageError
from cifar_zero.data.augment import Augmentation
from cifar_zero.data.dataset import Dataset, Split
from cifar_zero.data.memory_loader import MemoryLoader
from cifar_zero.data.order import EvalOrder, Order, TrainOrder
from cifar_zero.data.residence import Stored, place
from cifar_zero.strategies import replica

EVAL_BATCH_SIZE = 1000
"""Most images per rank in an evaluation batch: CIFAR-10's test set in ten equal batches, large enough to keep a GPU
busy, and small enough (12 MB of float32 input) that activations without gradients fit anywhere."""


class CIFARDataModule(LightningDataModule):
    """Training, validation and test loaders of any source.

    The Trainer must be made with `use_distributed_sampler=False`: the loaders are sharded here.
    """

    dataset: Dataset
    """All images, after `setup`."""

    def __init__(
        self,
        config: DataConfig,
        augment: AugmentConfig | None = None,
        *,
        batch_size: int,
        accumulate: int,
        seed: int,
        channels_last: bool = False,
    ) -> None:
        """`batch_size`: images of one optimizer step over all ranks, in `accumulate` micro-batches; `seed`: of the
        validation split, of the order and of the augmentation; `augment`: of the training images; `channels_last`:
        how the memory loader lays them on a GPU.

        Raises UsageError where --data.val_fraction is not in [0, 1).
        """
        super().__init__()
        if not 0 <= config.val_fraction < 1:
            raise UsageError(f"--data.val_fraction {config.val_fraction} must be at least 0 and less than 1")
        self.config = config
        self.source = ""
        """Name of the source really used, once it is known."""
        self._batch_size = batch_size
        self._accumulate = accumulate
        self._seed = seed
        self._channels_last = channels_last
        self._augment = augment or AugmentConfig()
        self._train = self._val = np.empty(0, np.int64)
        self._stored: dict[tuple[int, torch.device], Stored] = {}

    def prepare_data(self) -> None:
        """Download and decode (on one rank of each node); in milliseconds where that has been done before."""
        if not self.source:
            self.source = data.prepare(self.config)

    def setup(self, stage: str | None = None) -> None:
        """Map the images and hold out the validation images, once, whatever the stage.

        Raises UsageError where the batch cannot be divided among the ranks.
        """
        micro_batch_size(self._batch_size, self._replica[0], self._accumulate)
        if hasattr(self, "dataset"):
            return
        if self.trainer is None:
            self.prepare_data()
            chosen = self.source
        else:  # only rank 0's choice counts: `auto` may have been decided otherwise on another node
            chosen = self.trainer.strategy.broadcast(self.source)
        config = replace(self.config, source=cast(SourceName, chosen))
        if self.source != chosen:  # else this process has just prepared it
            self.source = data.prepare(config)
        self.dataset = data.load(config, self.source)
        self._train, self._val = stratified_split(self.dataset.train_labels, self.config.val_fraction, self._seed)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, by label."""
        return self.dataset.classes

    @property
    def num_train(self) -> int:
        """Training images, without those held out."""
        return len(self._train)

    @property
    def num_val(self) -> int:
        """Validation images, held out of the training images."""
        return len(self._val)

    @property
    def num_test(self) -> int:
        """Test images."""
        return len(self.dataset.test_labels)

    @property
    def micro_batch_size(self) -> int:
        """Images in one forward of this rank."""
        return micro_batch_size(self._batch_size, self._replica[0], self._accumulate)

    def sample(self, count: int) -> torch.Tensor:
        """Training images from all over the split, so of all classes: uint8 (n, 3, 32, 32), n at most `count`; the same
        on every rank."""
        rows = self._train[np.linspace(0, self.num_train - 1, min(count, self.num_train)).astype(np.int64)]
        return torch.from_numpy(self.dataset.train_images[rows])

    def train_dataloader(self) -> Any:
        """Shuffled micro-batches; whole optimizer steps only. Raises UsageError for fewer images than one batch."""
        split = Split(self.dataset.train_images, self.dataset.train_labels, self._train)
        # Lightning's overfit_batches trains on the first batches of an epoch: they must be the same in every epoch.
        shuffle = not getattr(self.trainer, "overfit_batches", 0)
        order = TrainOrder(split.count, self._batch_size, self._accumulate, *self._replica, self._seed, shuffle)
        asked = self._augment != AugmentConfig()
        augmentation = Augmentation(self._augment, split.count, len(self.classes), self._seed) if asked else None
        return self._loader(split, order, augmentation)

    def val_dataloader(self) -> Any:
        """Every validation image once; an empty list, with which Lightning skips validation, where there are none."""
        if not self.num_val:
            return []
        split = Split(self.dataset.train_images, self.dataset.train_labels, self._val)
        return self._loader(split, EvalOrder(split.count, EVAL_BATCH_SIZE, *self._replica))

    def test_dataloader(self) -> Any:
        """Every test image once."""
        split = Split(self.dataset.test_images, self.dataset.test_labels, np.arange(self.num_test))
        return self._loader(split, EvalOrder(split.count, EVAL_BATCH_SIZE, *self._replica))

    def _loader(self, split: Split, order: Order, augmentation: Augmentation | None = None) -> Any:
        if self.config.loader == "memory":
            key = id(split.images), self._device  # training and validation images are of the same array: one copy
            if key not in self._stored:
                self._stored[key] = place(split.images, self._device)
            return MemoryLoader(split, order, self._stored[key], augmentation, self._channels_last)
        from cifar_zero.data.torch_loader import TorchLoader  # here, as torchvision takes a second to import

        return TorchLoader(split, order, self.config.workers)

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")

    @property
    def _replica(self) -> tuple[int, int]:
        """Number of ranks that train on different images, and which of them this one is."""
        return replica(self.trainer.strategy) if self.trainer is not None else (1, 0)


def stratified_split(
    labels: NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices (train, held out) into `labels` (N,), each sorted: `fraction` of every class is held out, rounded.

    At least one image of each class stays in train.
    """
    rng = np.random.default_rng(seed)
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        held_out[members[: min(round(fraction * len(members)), len(members) - 1)]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
