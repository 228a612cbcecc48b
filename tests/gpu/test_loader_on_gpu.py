"""A GPU gets the same batches as the CPU, wherever the stored images are."""

import numpy as np
import pytest
import torch

from cifar_zero.config.recipe import AugmentConfig
from cifar_zero.data import loaders as loader
from cifar_zero.data.augment import Augmentation
from cifar_zero.data.dataset import Split, TrainOrder
from cifar_zero.data.loaders import ImageStore, MemoryLoader
from tests.support.helpers import needs_gpu

pytestmark = needs_gpu

COUNT, CLASSES, BATCH = 5000, 10, 16
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CONFIGS = [None, AugmentConfig(flip="alternating", crop=4, cutout=8, mixup=0.4, cutmix=1.0)]


def make_loader(split: Split, stored: ImageStore, config: AugmentConfig | None) -> MemoryLoader:
    order = TrainOrder(COUNT, BATCH, accumulate=1, replicas=1, replica=0, seed=3)
    return MemoryLoader(split, order, stored, config and Augmentation(config, COUNT, CLASSES, seed=3))


def place_where(share: float, split: Split, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    """Returns stored images. `share` is the share of the GPU's free memory that they may take. They are on the GPU if
    it is 1, and on the host if it is 0."""
    monkeypatch.setattr(loader, "RESIDENT_SHARE", share)
    stored = ImageStore(split.images, GPU)
    assert stored.rows_device == (GPU if share else CPU)
    return stored


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "augmented"])
@pytest.mark.parametrize("block_images", [1, 64, 1024])
def test_two_epochs_equal_those_of_the_cpu(
    config: AugmentConfig | None, block_images: int, monkeypatch: pytest.MonkeyPatch
):
    """Batches agree bit for bit. The GPU is kept busy, so that reading a block before its copy has ended would show."""
    for kind in loader.BLOCK_IMAGES:
        monkeypatch.setitem(loader.BLOCK_IMAGES, kind, block_images)
        monkeypatch.setitem(loader.GROUPED_BLOCK_IMAGES, kind, 16 * block_images)
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (COUNT, 32, 32, 3), dtype=np.uint8)
    split = Split(stored, rng.integers(0, CLASSES, COUNT), rng.permutation(COUNT))
    on_cpu = make_loader(split, ImageStore(split.images, CPU), config)
    resident = make_loader(split, place_where(1, split, monkeypatch), config)
    streamed = make_loader(split, place_where(0, split, monkeypatch), config)
    load = torch.rand(2048, 2048, device=GPU)
    for epoch in range(2):
        for each in (on_cpu, resident, streamed):
            each.sampler.set_epoch(epoch)  # pyright: ignore[reportOptionalMemberAccess]
        differing = torch.zeros((), dtype=torch.int64, device=GPU)
        for expected, *others in zip(on_cpu, resident, streamed, strict=True):
            load = (load @ load).clamp_(0, 1)
            images, labels = (part.to(GPU, non_blocking=True) for part in expected)
            for given_images, given_labels in others:
                assert given_images.device == given_labels.device == GPU
                assert given_images.is_contiguous()
                differing += (given_images != images).sum() + (given_labels != labels).sum()
        assert differing.item() == 0
