"""Draws the random augmentation of each image of an epoch, as a table that is looked up by position in the split.

The table depends only on the seed and the epoch. An image therefore gets the same augmentation on every rank, in every
micro-batch, and in a run that is resumed in the middle of an epoch.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cifar_zero.config.recipe import AugmentConfig
from cifar_zero.models import IMAGE_SHAPE

GROUPS = 64
"""Number of groups into which the images of an epoch are divided. The images of a group share the draws of the
augmentation policy and of the user's transform, because torchvision's transforms draw once per call. With one call for
each image, RandAugment made 1,800 instead of 18,800 images/s (one core of an AMD EPYC, torchvision 0.30)."""


class Draws(NamedTuple):
    """Random draws with one row per image. A column is None if its augmentation is off. A box is (top, bottom, left,
    right), where bottom and right are excluded."""

    flip: Tensor | None = None  # bool (n,): whether the image is mirrored
    crop: Tensor | None = None  # int64 (n, 2): top left corner in the padded image, each from 0 to twice the border
    cutout: Tensor | None = None  # int64 (n, 4): box that is blanked out
    partner: Tensor | None = None  # int64 (n,): position of the image that is mixed in, a permutation of the split
    box: Tensor | None = None  # int64 (n, 4): box in which the partner is mixed in, the whole image for mixup
    weight: Tensor | None = None  # float32 (n,): share of the partner in that box, 1 for cutmix
    erasing: Tensor | None = None  # int64 (n, 4): box that is set to the mean
    group: Tensor | None = None  # int64 (n,), on the CPU: seed of the transforms, one of GROUPS seeds in each epoch

    def each(self, change: Callable[[Tensor], Tensor]) -> "Draws":
        """Returns the table with `change` applied to every column that is not None."""
        return Draws(*(None if column is None else change(column) for column in self))


def draw(config: AugmentConfig, count: int, seed: int, epoch: int, side: int = IMAGE_SHAPE[1]) -> Draws:
    """Draws, on the CPU, the table of one epoch for a split of `count` images of `side` x `side` pixels. numpy's
    generator is used, because it has the beta distribution and accepts seed and epoch as two numbers. The global
    generators are not used."""
    rng = _generator(seed, epoch)
    drawn: dict[str, Any] = {}
    if config.flip == "random":
        drawn["flip"] = rng.integers(0, 2, count, dtype=bool)
    elif config.flip == "alternating":
        # Each image is seen both ways alternately (Keller Jordan, github.com/KellerJordan/cifar10-airbench).
        drawn["flip"] = _generator(seed, 0).integers(0, 2, count, dtype=bool) ^ bool(epoch % 2)
    if config.crop:
        drawn["crop"] = rng.integers(0, 2 * config.crop + 1, (count, 2))
    if config.cutout:
        drawn["cutout"] = _boxes(rng, np.full(count, config.cutout), side)
    if config.mixup or config.cutmix:
        drawn["partner"] = rng.permutation(count)
        drawn["box"], drawn["weight"] = _mixing(config, rng, count, side)
    if config.erasing:
        drawn["erasing"] = _rectangles(rng, count, side) * (rng.random((count, 1)) < config.erasing)
    if config.policy != "none" or config.transform:
        drawn["group"] = rng.integers(2**63, size=GROUPS)[rng.integers(0, GROUPS, count)]
    return Draws(**{name: torch.from_numpy(column) for name, column in drawn.items()})


def _mixing(
    config: AugmentConfig, rng: np.random.Generator, count: int, side: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draws for each image a box (count, 4), and the partner's weight (count,) inside this box, for mixup (Zhang et al.
    2018) or cutmix (Yun et al. 2019). If both are on, an image gets either with probability 1/2."""
    boxes = np.tile(np.array([0, side, 0, side]), (count, 1))
    weights = np.ones(count, np.float32)
    if config.cutmix:
        share = rng.beta(config.cutmix, config.cutmix, count)
        boxes = _boxes(rng, (side * np.sqrt(share)).astype(np.int64), side)
    if config.mixup:
        blended = np.ones(count, bool)
        if config.cutmix:
            blended = rng.integers(0, 2, count, dtype=bool)
        boxes[blended] = [0, side, 0, side]
        weights = np.where(blended, rng.beta(config.mixup, config.mixup, count), 1).astype(np.float32)
    return boxes, weights


def _boxes(rng: np.random.Generator, sides: NDArray[np.int64], side: int) -> NDArray[np.int64]:
    """Draws squares (count, 4) whose sides in pixels are `sides` (count,). The centre of a square is anywhere in the
    image, and the square is cut at the image's borders."""
    start = rng.integers(0, side, (len(sides), 2)) - (sides // 2)[:, None]
    ends = np.stack([start, start + sides[:, None]], axis=2)  # (count, vertical or horizontal, start or stop)
    return ends.clip(0, side).reshape(-1, 4)


def _rectangles(rng: np.random.Generator, count: int, side: int) -> NDArray[np.int64]:
    """Draws rectangles (count, 4) within the image, with the area and the aspect ratio of random erasing (Zhong et al.
    2017, torchvision's defaults). A side that is longer than the image is cut to the image's side."""
    area, log_aspect = rng.uniform(0.02, 0.33, count), rng.uniform(math.log(0.3), math.log(3.3), count)
    aspect = np.exp(log_aspect / 2)[:, None] ** [1, -1]
    lengths = (side * np.sqrt(area)[:, None] * aspect).round().clip(1, side).astype(np.int64)
    start = rng.integers(0, side + 1 - lengths)
    return np.stack([start, start + lengths], axis=2).reshape(-1, 4)


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch,)))
