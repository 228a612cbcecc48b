"""Both loaders give the same images in the same order as torch's DistributedSampler."""

import os
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset
from torchvision.transforms import Normalize

from cifar_zero.config.recipe import AugmentConfig, inputs
from cifar_zero.core import exits
from cifar_zero.data.augment import Augmentation, normalize
from cifar_zero.data.dataset import IGNORED, EvalOrder, Split, TrainOrder
from cifar_zero.data.loaders import MemoryLoader, TorchLoader

COUNT = 53  # a prime number
BATCH = 8


def make_split() -> Split:
    """Returns 53 of 60 stored images in a random order. The label of an image is its row, which identifies it."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    images.flags.writeable = False
    return Split(images, np.arange(60), rng.permutation(60)[:COUNT])


@pytest.mark.parametrize(
    ("world_size", "accumulate", "workers", "normalization"),
    [(1, 1, 0, "half"), (2, 2, 2, "half"), (1, 1, 0, "imagenet"), (1, 1, 0, "0.4,0.3")],
)
def test_both_loaders_agree_bit_by_bit(world_size: int, accumulate: int, workers: int, normalization: str):
    split, seen = make_split(), inputs(32, normalization)
    for rank in range(world_size):
        orders = [TrainOrder(COUNT, BATCH, accumulate, world_size, rank, seed=3) for _ in range(2)]
        augmentation = Augmentation(AugmentConfig(), COUNT, 60, 3, seen)
        memory, tutorial = (
            MemoryLoader(split, orders[0], None, augmentation),
            TorchLoader(split, orders[1], workers, seen),
        )
        assert len(memory) == len(tutorial) == COUNT // BATCH * accumulate
        for epoch in range(2):
            memory.sampler.set_epoch(epoch)  # pyright: ignore[reportOptionalMemberAccess]
            orders[1].set_epoch(epoch)
            for (images, labels), (same_images, same_labels) in zip(memory, tutorial, strict=True):
                assert images.shape == (BATCH // accumulate // world_size, 3, 32, 32)
                assert torch.equal(images, same_images)
                assert torch.equal(labels, same_labels)


@pytest.mark.usefixtures("signal_handlers")
def test_workers_outlive_the_signals_that_stop_a_training():
    """Workers that start before the training, in a sanity check, inherit handlers that end the process."""
    exits.install()
    batches = iter(loader := TorchLoader(make_split(), EvalOrder(COUNT, BATCH, 1, 0), workers=1))
    next(batches)
    (worker,) = loader._iterator._workers  # pyright: ignore
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(worker.pid, number)
    assert len([*batches]) == COUNT // BATCH


def test_cifars_normalisation_takes_mean_and_deviation_by_channel():
    pixels = torch.tensor(make_split().images).permute(0, 3, 1, 2)
    expected = Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))(pixels / 255)
    torch.testing.assert_close(normalize(pixels, inputs(32, "cifar")), expected)


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (2, 1), (4, 2)])
def test_the_order_is_distributed_samplers_and_steps_see_the_same_images(world_size: int, accumulate: int):
    """The ranks of torch's sampler take turns in one shuffled order, so that each step has the same images for any
    number of ranks. The last 5 of 53 images fill no step."""
    for rank in range(world_size):
        reference = DistributedSampler(TensorDataset(torch.empty(COUNT)), world_size, rank, seed=3, drop_last=True)
        order = TrainOrder(COUNT, BATCH, accumulate, world_size, rank, seed=3)
        for sampler in (reference, order):
            sampler.set_epoch(5)
        assert order.positions().flatten().tolist() == list(reference)[: 48 // world_size]


@pytest.mark.parametrize(("world_size", "max_batch_size"), [(1, 7), (3, 7), (4, 1), (2, 1000)])
def test_evaluation_counts_every_image_once(world_size: int, max_batch_size: int):
    split = make_split()
    counted, shapes = [], set()
    for rank in range(world_size):
        orders = [EvalOrder(COUNT, max_batch_size, world_size, rank) for _ in range(2)]
        batches = list(MemoryLoader(split, orders[0]))
        assert len(batches) == len(orders[0])
        shapes.add((len(batches), *{labels.shape for _, labels in batches}))
        for (images, labels), (same_images, same_labels) in zip(batches, TorchLoader(split, orders[1], 0), strict=True):
            assert torch.equal(images, same_images)
            assert torch.equal(labels, same_labels)
            assert len(labels) <= max_batch_size
            for image, label in zip(images, labels.tolist(), strict=True):
                if label != IGNORED:
                    counted.append(label)
                    assert torch.equal(image, normalize(torch.tensor(split.images[label]).permute(2, 0, 1)[None])[0])
    assert sorted(counted) == sorted(split.labels[:-1].tolist())
    assert len(shapes) == 1, "every rank must make as many forwards, of one shape"
