"""What chance decides about each image of an epoch: one table for all ranks, looked up by position in the split.

The table depends on the seed and the epoch alone. An image gets the same augmentation whichever rank and micro-batch
holds it, and a run that is resumed in the middle of an epoch goes on as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cifar_zero.config.flags import AugmentConfig
from cifar_zero.models import IMAGE_SHAPE

SIDE = IMAGE_SHAPE[1]
"""Height and width of an image in pixels."""


class Draws(NamedTuple):
    """One row per image; None for what is not asked for. A box is top, bottom, left and right in pixels, the bottom and
    the right excluded."""

    flip: Tensor | None = None
    """Whether the image is mirrored: bool (n,)."""

    crop: Tensor | None = None
    """Top left corner of the crop in the image with its border: int64 (n, 2), each from 0 to twice the border."""

    cutout: Tensor | None = None
    """Box that is blanked out: int64 (n, 4)."""

    partner: Tensor | None = None
    """Position of the image that is mixed in, a permutation of the split: int64 (n,)."""

    box: Tensor | None = None
    """Box in which the partner is mixed in, the whole image for mixup: int64 (n, 4)."""

    weight: Tensor | None = None
    """Share of the partner in that box, 1 for cutmix: float32 (n,)."""

    brightness: Tensor | None = None
    """What is added to all pixels, normalised: float32 (n,)."""

    contrast: Tensor | None = None
    """What they are multiplied by: float32 (n,)."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Draws:
        """The same with every column changed."""
        return Draws(*(None if column is None else change(column) for column in self))


def draw(config: AugmentConfig, count: int, seed: int, epoch: int) -> Draws:
    """The table of an epoch of a split of `count` images, on the CPU.

    numpy's generator: it takes the seed and the epoch as two numbers, where torch's takes one, and knows the beta
    distribution. The global generators are left alone.
    """
    rng = _generator(seed, epoch)
    drawn: dict[str, Any] = {}
    if config.flip == "random":
        drawn["flip"] = rng.integers(0, 2, count, dtype=bool)
    elif config.flip == "alternating":
        # Keller Jordan, airbench (github.com/KellerJordan/cifar10-airbench): each image is seen both ways in turn.
        drawn["flip"] = _generator(seed, 0).integers(0, 2, count, dtype=bool) ^ bool(epoch % 2)
    if config.crop:
        drawn["crop"] = rng.integers(0, 2 * config.crop + 1, (count, 2))
    if config.cutout:
        drawn["cutout"] = _boxes(rng, np.full(count, config.cutout))
    if config.mixup or config.cutmix:
        drawn["partner"] = rng.permutation(count)
        drawn["box"], drawn["weight"] = _mixing(config, rng, count)
    if config.brightness:  # what has come last is drawn last: the draws of older recipes stay what they were
        drawn["brightness"] = rng.uniform(-config.brightness, config.brightness, count).astype(np.float32)
    if config.contrast:
        drawn["contrast"] = rng.uniform(1 - config.contrast, 1 + config.contrast, count).astype(np.float32)
    return Draws(**{name: torch.from_numpy(column) for name, column in drawn.items()})


def _mixing(
    config: AugmentConfig, rng: np.random.Generator, count: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Boxes (count, 4) and the partner's weights (count,) in them: of mixup (Zhang et al. 2018), of cutmix (Yun et al.
    2019), or of the one or the other with probability 1/2."""
    boxes = np.tile(np.array([0, SIDE, 0, SIDE]), (count, 1))
    weights = np.ones(count, np.float32)
    if config.cutmix:
        share = rng.beta(config.cutmix, config.cutmix, count)
        boxes = _boxes(rng, (SIDE * np.sqrt(share)).astype(np.int64))
    if config.mixup:
        blended = rng.integers(0, 2, count, dtype=bool) if config.cutmix else np.ones(count, bool)
        boxes[blended] = [0, SIDE, 0, SIDE]
        weights = np.where(blended, rng.beta(config.mixup, config.mixup, count), 1).astype(np.float32)
    return boxes, weights


def _boxes(rng: np.random.Generator, sides: NDArray[np.int64]) -> NDArray[np.int64]:
    """Squares (count, 4) of `sides` pixels (count,) with a centre anywhere in the image, cut at its borders."""
    start = rng.integers(0, SIDE, (len(sides), 2)) - (sides // 2)[:, None]
    ends = np.stack([start, start + sides[:, None]], axis=2)  # (count, vertical or horizontal, start or stop)
    return ends.clip(0, SIDE).reshape(-1, 4)


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch,)))
