"""The LightningDataModule: loads images in batches that have the same content and order under every strategy."""

import socket
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule

from cifar_zero import data
from cifar_zero.config.recipe import AugmentConfig
from cifar_zero.config.rules import of_validation
from cifar_zero.config.settings import Settings
from cifar_zero.core.console import say
from cifar_zero.core.errors import UsageError
from cifar_zero.data.augment import Augmentation
from cifar_zero.data.cache import Dataset
from cifar_zero.data.dataset import EvalOrder, Order, Split, TrainOrder, stratified_split
from cifar_zero.data.loaders import ImageStore, MemoryLoader, TorchLoader
from cifar_zero.launch import rank_environment
from cifar_zero.launch.collectives import gather
from cifar_zero.strategies import hooks_of

EVAL_BATCH_SIZE = 1000
"""Largest number of images per rank in an evaluation batch, for images of 32 x 32 pixels. With larger images, a batch
has fewer. A batch of 1,000 keeps a GPU busy, is small enough (12 MB of float32 input) for the activations to fit into
any memory, and divides CIFAR-10's test set into ten equal batches."""


class CIFARDataModule(LightningDataModule):
    """Creates the training, validation and test loaders for any image source. The loaders shard the data over the ranks
    themselves, so the Trainer must be created with `use_distributed_sampler=False`.

    Args:
        settings: The options of the run.
        expected_identity: `Dataset.identity` of the images on which the resumed run was trained; `setup` refuses other
            images. None for a new run.
    """

    dataset: Dataset  # all images, after `setup`

    def __init__(self, settings: Settings, expected_identity: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.settings = settings
        self._expected_identity = expected_identity
        self._data = settings.data
        self.source = ""  # name of the source in use, once it is prepared
        self._train = self._val = np.empty(0, np.int64)
        self._stored: dict[tuple[int, torch.device], ImageStore] = {}

    def prepare_data(self) -> None:
        """Downloads and decodes the images, if necessary, and sets `source`. Lightning calls this method on one rank of
        each node. If the images are already decoded, it only reads them to compare their checksums."""
        if not self.source:
            self.source = data.prepare(self._data)

    def setup(self, stage: str | None = None) -> None:
        """Maps the images into memory and holds out the validation images. Every rank must call it. Later calls, for
        other stages, do nothing. If all classes are too small to hold out an image, rank 0 prints that the run has no
        validation.

        Raises:
            UsageError: The ranks have different images, the resumed run had other images, or an option needs validation
                images and there are none.
        """
        if hasattr(self, "dataset"):
            return
        if rank_environment.local_rank() and self._data.source != "auto":
            self.source = self._data.source  # the node's first rank has checked all of its bytes
        self.prepare_data()
        self.dataset = data.load(self._data, self.source)
        self._check_same_images()
        self._train, self._val = stratified_split(
            self.dataset.train_labels, self._data.val_fraction, self.settings.recipe.seed
        )
        if self._data.val_fraction and not len(self._val):
            why = f"--data.val_fraction {self._data.val_fraction:g} holds out no image, because classes are too small"
            if needed := of_validation(self.settings):
                raise UsageError(f"{why}, and --{needed[0]} needs validation images: use a larger fraction")
            if rank_environment.global_rank() == 0:
                say(f"{why}; the run has no validation")

    def _check_same_images(self) -> None:
        own = dict(self.dataset.identity)
        source = f"--data.source {self.source}"
        of_ranks = gather((socket.gethostname(), own))
        first_host, first = of_ranks[0]
        for host, other in of_ranks:
            if other != first:
                raise UsageError(
                    f"{source}: {host} has {_counts(other)}, which differ from the {_counts(first)} of {first_host}: "
                    "give all nodes the same files"
                )
        if self._expected_identity not in (None, own):
            resume = self.settings.output.resume
            raise UsageError(
                f"--resume {resume}: the resumed run had {_counts(self._expected_identity)}, but {source} now has "
                f"other images ({_counts(own)}): use the same images, or start a new run with --weights {resume} and "
                "without --resume"
            )

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, indexed by label."""
        return self.dataset.classes

    @property
    def num_train(self) -> int:
        """Number of training images without those held out for validation."""
        return len(self._train)

    @property
    def num_test(self) -> int:
        return len(self.dataset.test_labels)

    def sample(self, count: int) -> torch.Tensor:
        """Returns `count` training images, or all if there are fewer, as uint8 (n, 3, H, W). They are evenly spaced
        over the training images, so that they come from all classes."""
        rows = self._train[np.linspace(0, self.num_train - 1, min(count, self.num_train)).astype(np.int64)]
        return torch.from_numpy(self.dataset.train_images[rows]).permute(0, 3, 1, 2)

    def train_dataloader(self) -> Any:
        """Returns a loader of this replica's micro-batches, only as many as fill whole optimizer steps. They are
        shuffled, except with --trainer.overfit_batches. Raises UsageError if there are fewer training images than one
        batch."""
        split = Split(self.dataset.train_images, self.dataset.train_labels, self._train)
        # Lightning's overfit_batches trains on the first batches of an epoch: they must be the same in every epoch.
        shuffle = not getattr(self.trainer, "overfit_batches", 0)
        recipe, accumulate = self.settings.recipe, self.settings.placement.accumulate
        order = TrainOrder(split.count, recipe.batch_size, accumulate, *self._replica, recipe.seed, shuffle)
        return self._loader(split, order, recipe.augment)

    def val_dataloader(self) -> Any:
        """Returns a loader of this replica's share of the validation images, each once, in padded batches (see
        `EvalOrder`). Without validation images, returns an empty list, which makes Lightning skip validation."""
        if not len(self._val):
            return []
        return self._eval_loader(Split(self.dataset.train_images, self.dataset.train_labels, self._val))

    def test_dataloader(self) -> Any:
        """Returns a loader of this replica's share of the test images, each once, in padded batches (see
        `EvalOrder`)."""
        return self._eval_loader(Split(self.dataset.test_images, self.dataset.test_labels, np.arange(self.num_test)))

    def _eval_loader(self, split: Split) -> Any:
        order = EvalOrder(split.count, self._data.inputs.batch_size_of_equal_pixels(EVAL_BATCH_SIZE), *self._replica)
        return self._loader(split, order, AugmentConfig())

    def _loader(self, split: Split, order: Order, augment: AugmentConfig) -> Any:
        inputs = self._data.inputs
        if self._data.loader == "memory":
            key = id(split.images), self._device  # training and validation images share one array, and so one copy
            if key not in self._stored:
                self._stored[key] = ImageStore(split.images, self._device)
            augmentation = Augmentation(augment, split.count, len(self.classes), self.settings.recipe.seed, inputs)
            return MemoryLoader(split, order, self._stored[key], augmentation)
        return TorchLoader(split, order, self._data.workers, inputs, pin=self._device.type == "cuda")

    @property
    def _device(self) -> torch.device:
        if self.trainer is not None:
            return self.trainer.strategy.root_device
        return torch.device("cpu")

    @property
    def _replica(self) -> tuple[int, int]:
        """Number of replicas that train on different images, and the index of this rank's replica."""
        return hooks_of(self.trainer and self.trainer.strategy).replica()


def _counts(identity: Mapping[str, int]) -> str:
    return f"{identity['train']:,} training and {identity['test']:,} test images"
