"""Reflected borders, brightness and contrast compared with the plain formulas, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cifar_zero.config import command_line
from cifar_zero.config.flags import AugmentConfig
from cifar_zero.core.errors import UsageError
from cifar_zero.data.augment import Augmentation, normalize
from cifar_zero.data.dataset import Split, TrainOrder
from cifar_zero.data.draws import draw
from cifar_zero.data.memory_loader import MemoryLoader

COUNT = 48
CONFIG = AugmentConfig(flip="alternating", crop=3, padding="reflect", brightness=0.2, contrast=0.3)


def split() -> Split:
    images = np.random.default_rng(0).integers(0, 256, (COUNT, 3, 32, 32), dtype=np.uint8)
    return Split(images, np.arange(COUNT), np.arange(COUNT))


def seen(config: AugmentConfig, epoch: int, ranks: int = 1) -> Tensor:
    """Returns all images of an epoch, by their position."""
    side = config.low_resolution if epoch < config.low_epochs else 32
    found = torch.empty(COUNT, 3, side, side)
    for rank in range(ranks):
        order = TrainOrder(COUNT, 8, 1, ranks, rank, seed=3)
        order.set_epoch(epoch)
        for images, labels in MemoryLoader(split(), order, None, Augmentation(config, COUNT, COUNT, 3)):
            found[labels] = images
    return found


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_images_of_the_first_epochs_are_smaller(epoch: int):
    """A pixel of 16 x 16 is that of 32 x 32 filtered by (1, 3, 3, 1) / 8 in each direction; the same on any rank."""
    config = replace(CONFIG, low_resolution=16, low_epochs=2)
    whole, found = seen(CONFIG, epoch), seen(config, epoch)
    if epoch == 2:
        assert torch.equal(found, whole)
        return
    kernel = torch.tensor([1.0, 3, 3, 1]) / 8
    weights = (kernel[:, None] * kernel)[None, None].repeat(3, 1, 1, 1)
    expected = F.conv2d(whole, weights, stride=2, padding=1, groups=3)
    assert torch.allclose(found[:, :, 1:-1, 1:-1], expected[:, :, 1:-1, 1:-1], atol=1e-6)
    for ranks in (2, 4):
        assert torch.equal(seen(config, epoch, ranks), found)


@pytest.mark.parametrize("epoch", [0, 1])
def test_images_are_the_plain_formulas(epoch: int):
    draws = draw(CONFIG, COUNT, 3, epoch)
    assert draws.flip is not None
    assert draws.crop is not None
    assert draws.brightness is not None
    assert draws.contrast is not None
    assert draws.brightness.abs().max() <= 0.2
    assert (draws.contrast - 1).abs().max() <= 0.3
    assert min(draws.brightness.std() / 0.2, draws.contrast.std() / 0.3) > 0.4  # uniform: 0.58
    expected = []
    for position, image in enumerate(normalize(torch.from_numpy(split().images))):
        turned = image.flip(2) if draws.flip[position] else image
        top, left = draws.crop[position].tolist()
        padded = F.pad(turned[None], (3, 3, 3, 3), mode="reflect")[0]
        expected.append(
            (padded[:, top : top + 32, left : left + 32] + draws.brightness[position]) * draws.contrast[position]
        )
    assert torch.equal(seen(CONFIG, epoch), torch.stack(expected))
    assert torch.equal(seen(CONFIG, epoch, ranks=2), torch.stack(expected))


def test_what_is_drawn_last_changes_no_older_draws():
    older = AugmentConfig(flip="random", crop=3, cutout=4, mixup=0.5, cutmix=1.0)
    before = draw(older, COUNT, 3, 1)
    now = draw(AugmentConfig(**{**vars(older), "brightness": 0.2, "contrast": 0.3}), COUNT, 3, 1)
    for name in ("flip", "crop", "cutout", "partner", "box", "weight"):
        assert torch.equal(getattr(before, name), getattr(now, name)), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--augment.brightness 1", "--augment.brightness must be at least 0 and under 1, not 1.0"),
        ("--augment.contrast -0.1", "--augment.contrast must be at least 0 and under 1, not -0.1"),
        ("--augment.padding reflect", "--augment.padding reflect needs --augment.crop"),
        ("--augment.padding grey", "--augment.padding: expected one of ['black', 'reflect'], not grey"),
    ],
)
def test_mistakes_are_one_clear_line(flags: str, message: str):
    with pytest.raises(UsageError, match=r"^--augment\.") as error:
        command_line.parse(flags.split())
    assert message in str(error.value)
