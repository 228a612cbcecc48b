"""Reflected borders compared with the plain formulas, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cifar_zero.config import command_line
from cifar_zero.config.recipe import AugmentConfig
from cifar_zero.core.errors import UsageError
from cifar_zero.data.augment import Augmentation, normalize
from cifar_zero.data.dataset import Split, TrainOrder
from cifar_zero.data.draws import draw
from cifar_zero.data.loaders import MemoryLoader

COUNT = 48
CONFIG = AugmentConfig(flip="alternating", crop=3, padding="reflect")


def split() -> Split:
    images = np.random.default_rng(0).integers(0, 256, (COUNT, 3, 32, 32), dtype=np.uint8)
    return Split(images, np.arange(COUNT), np.arange(COUNT))


def seen(config: AugmentConfig, epoch: int, ranks: int = 1) -> Tensor:
    """Returns all images of an epoch, by their position."""
    found = torch.empty(COUNT, 3, 32, 32)
    for rank in range(ranks):
        order = TrainOrder(COUNT, 8, 1, ranks, rank, seed=3)
        order.set_epoch(epoch)
        for images, labels in MemoryLoader(split(), order, None, Augmentation(config, COUNT, COUNT, 3)):
            found[labels] = images
    return found


@pytest.mark.parametrize("epoch", [0, 1])
def test_images_are_the_plain_formulas(epoch: int):
    draws = draw(CONFIG, COUNT, 3, epoch)
    assert draws.flip is not None
    assert draws.crop is not None
    expected = []
    for position, image in enumerate(normalize(torch.from_numpy(split().images))):
        turned = image.flip(2) if draws.flip[position] else image
        top, left = draws.crop[position].tolist()
        padded = F.pad(turned[None], (3, 3, 3, 3), mode="reflect")[0]
        expected.append(padded[:, top : top + 32, left : left + 32])
    assert torch.equal(seen(CONFIG, epoch), torch.stack(expected))
    assert torch.equal(seen(CONFIG, epoch, ranks=2), torch.stack(expected))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--augment.padding grey", "--augment.padding: expected one of ['black', 'reflect'], not grey"),
    ],
)
def test_mistakes_are_one_clear_line(flags: str, message: str):
    with pytest.raises(UsageError, match=r"^--augment\.") as error:
        command_line.parse(flags.split())
    assert message in str(error.value)
