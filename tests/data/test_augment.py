"""Augmentation does what its name says, the same to each image whatever the ranks, the accumulation and the block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms import v2

from cifar_zero.config.recipe import AugmentConfig
from cifar_zero.data import loaders as loader
from cifar_zero.data.augment import Augmentation
from cifar_zero.data.dataset import Split, TrainOrder
from cifar_zero.data.draws import GROUPS, Draws, draw
from cifar_zero.data.loaders import MemoryLoader

COUNT = 53  # divides by nothing
STORED = 60
BATCH = 8
SEED = 3
ALL = AugmentConfig(flip="random", crop=4, cutout=9, mixup=0.5, cutmix=1.0)
EVERYTHING = replace(ALL, erasing=0.5, policy="randaugment")
MANY = 20_000


POLICIES = {
    "randaugment": v2.RandAugment(),
    "autoaugment": v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10),
    "trivialaugment": v2.TrivialAugmentWide(),
}


def make_split(images: NDArray[np.uint8]) -> Split:
    """Returns 53 of 60 stored images in a random order; each image is its own class."""
    return Split(images, np.arange(STORED), np.random.default_rng(0).permutation(STORED)[:COUNT])


def noise() -> Split:
    return make_split(np.random.default_rng(0).integers(0, 256, (STORED, 3, 32, 32), dtype=np.uint8))


def make_loader(split: Split, config: AugmentConfig, world_size: int = 1, rank: int = 0, accumulate: int = 1):
    order = TrainOrder(COUNT, BATCH, accumulate, world_size, rank, SEED)
    return MemoryLoader(split, order, None, Augmentation(config, COUNT, STORED, SEED))


def by_position(
    split: Split, config: AugmentConfig, epoch: int, world_size: int = 1, accumulate: int = 1
) -> dict[int, tuple[Tensor, Tensor]]:
    """Image and label at each position that an epoch visits, over all ranks."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for rank in range(world_size):
        ranks_loader = make_loader(split, config, world_size, rank, accumulate)
        ranks_loader.batch_sampler.sampler.set_epoch(epoch)  # pyright: ignore[reportOptionalMemberAccess]
        images, labels = (torch.cat(parts) for parts in zip(*ranks_loader, strict=True))
        positions = ranks_loader.batch_sampler.positions().flatten().tolist()
        found |= dict(zip(positions, zip(images, labels, strict=True), strict=True))
    return found


def expected(split: Split, config: AugmentConfig, draws: Draws, position: int) -> tuple[NDArray[np.float32], Tensor]:
    """Returns an augmented image, computed one by one with plain indexing."""
    image, own_label = alone(split, config, draws, position), int(split.labels[position])
    if draws.partner is None or draws.box is None or draws.weight is None:
        return image, torch.tensor(own_label)
    partner = int(draws.partner[position])
    top, bottom, left, right = draws.box[position].tolist()
    weight, inside = draws.weight[position].numpy(), np.s_[:, top:bottom, left:right]
    image[inside] = image[inside] * (np.float32(1) - weight) + alone(split, config, draws, partner)[inside] * weight
    share = float(weight) * (bottom - top) * (right - left) / 32**2
    labels = torch.zeros(STORED)
    labels[own_label] += 1 - share
    labels[split.labels[partner]] += share
    return image, labels


def alone(split: Split, config: AugmentConfig, draws: Draws, position: int) -> NDArray[np.float32]:
    pixels = split.images[split.indices[position]]
    if draws.flip is not None and draws.flip[position]:
        pixels = pixels[:, :, ::-1]
    if draws.crop is not None:
        y, x = draws.crop[position].tolist()
        pixels = np.pad(pixels, ((0, 0), (config.crop,) * 2, (config.crop,) * 2))[:, y : y + 32, x : x + 32]
    if draws.group is not None:
        torch.manual_seed(int(draws.group[position]))
        pixels = POLICIES[config.policy](torch.from_numpy(pixels.copy())[None])[0].numpy()
    image = (pixels.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    for boxes in (boxes for boxes in (draws.cutout, draws.erasing) if boxes is not None):
        top, bottom, left, right = boxes[position].tolist()
        image[:, top:bottom, left:right] = 0
    return image


@pytest.mark.parametrize(
    "config",
    [
        AugmentConfig(flip="alternating"),
        AugmentConfig(crop=5),
        AugmentConfig(flip="random", crop=16),
        AugmentConfig(cutout=9),
        AugmentConfig(mixup=0.4),
        AugmentConfig(cutmix=1.0),
        ALL,
        AugmentConfig(erasing=0.5, policy="randaugment"),
        replace(ALL, policy="autoaugment"),
        AugmentConfig(flip="random", policy="trivialaugment"),
    ],
    ids=str,
)
@pytest.mark.parametrize("epoch", [0, 1])
def test_blocks_get_what_plain_indexing_gives_each_image(config: AugmentConfig, epoch: int) -> None:
    split = noise()
    draws = draw(config, COUNT, SEED, epoch)
    found = by_position(split, config, epoch)
    assert len(found) == COUNT // BATCH * BATCH
    for position, (image, label) in found.items():
        expected_image, expected_label = expected(split, config, draws, position)
        assert np.array_equal(image, expected_image)
        torch.testing.assert_close(label, expected_label)


@pytest.mark.parametrize(
    ("world_size", "accumulate", "block_images"),
    [(1, 1, 1), (1, 2, 7), (2, 1, 16), (2, 2, 128), (4, 1, 24), (4, 2, 3)],
)
def test_ranks_accumulation_and_blocks_change_nothing(
    world_size: int, accumulate: int, block_images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = noise()
    for epoch in range(2):
        one_rank = by_position(split, EVERYTHING, epoch)
        monkeypatch.setitem(loader.BLOCK_IMAGES, "cpu", block_images)
        monkeypatch.setattr(loader, "STRETCH_BLOCKS", 2)
        several = by_position(split, EVERYTHING, epoch, world_size, accumulate)
        monkeypatch.undo()
        assert one_rank.keys() == several.keys()
        for position in one_rank:
            assert all(torch.equal(*pair) for pair in zip(one_rank[position], several[position], strict=True))


@pytest.mark.parametrize("given", [1, 3, 11])
def test_a_resumed_epoch_continues_as_if_never_stopped(given: int) -> None:
    split = noise()
    whole, stopped, resumed = (make_loader(split, EVERYTHING, accumulate=2) for _ in range(3))
    for each in (whole, stopped, resumed):
        each.sampler.set_epoch(4)  # pyright: ignore[reportOptionalMemberAccess]
    batches = list(whole)
    running = iter(stopped)
    for _ in range(given):
        next(running)
    resumed.load_state_dict(stopped.state_dict())
    rest = list(resumed)
    assert len(rest) == len(whole) - given
    for one, other in zip(batches[given:], rest, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert len(list(resumed)) == len(list(stopped)) == len(whole), "only the epoch that was begun is shorter"
    resumed.load_state_dict(stopped.state_dict())
    resumed.sampler.set_epoch(5)  # pyright: ignore[reportOptionalMemberAccess]
    assert len(list(resumed)) == len(whole), "another epoch begins at its beginning"


def test_random_flips_are_half_and_alternating_ones_flip_each_image_every_second_epoch() -> None:
    flips = [column(draw(AugmentConfig(flip="random"), MANY, SEED, epoch).flip) for epoch in range(2)]
    for flip in flips:
        assert abs(flip.float().mean() - 0.5) < 0.02  # 5.7 standard deviations
    assert abs((flips[0] == flips[1]).float().mean() - 0.5) < 0.02
    flips = [column(draw(AugmentConfig(flip="alternating"), MANY, SEED, epoch).flip) for epoch in range(4)]
    assert abs(flips[0].float().mean() - 0.5) < 0.02
    assert torch.equal(flips[0], ~flips[1])
    assert torch.equal(flips[0], flips[2])
    assert torch.equal(flips[1], flips[3])


def test_draws_cover_all_places_and_differ_by_seed_and_epoch() -> None:
    draws = draw(EVERYTHING, MANY, SEED, 0)
    assert {tuple(corner) for corner in column(draws.crop).tolist()} == {(y, x) for y in range(9) for x in range(9)}
    boxes = column(draws.cutout)
    heights, widths = boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2]
    assert {*heights.tolist()} == {*widths.tolist()} == {5, 6, 7, 8, 9}  # a centre on the border leaves 5 of 9
    for pixel in range(32):
        assert ((boxes[:, 0] <= pixel) & (pixel < boxes[:, 1])).any()
    assert sorted(column(draws.partner).tolist()) == list(range(MANY))
    pasted = column(draws.weight) == 1
    assert abs(pasted.float().mean() - 0.5) < 0.02
    assert (column(draws.box)[~pasted] == torch.tensor([0, 32, 0, 32])).all()
    assert len(column(draws.group).unique()) == GROUPS
    for other in (draw(EVERYTHING, MANY, SEED, 1), draw(EVERYTHING, MANY, SEED + 1, 0)):
        assert not any(torch.equal(column(one), column(two)) for one, two in zip(draws, other, strict=True))


def test_erased_rectangles_have_the_shape_of_torchvisions() -> None:
    boxes = column(draw(AugmentConfig(erasing=0.25), MANY, SEED, 0).erasing)
    assert ((boxes >= 0) & (boxes <= 32)).all()
    boxes = boxes[boxes[:, 1] > boxes[:, 0]]
    assert abs(len(boxes) / MANY - 0.25) < 0.02
    erase, image = v2.RandomErasing(1.0), torch.ones(1, 32, 32)
    theirs = torch.stack([erase(image) == 0 for _ in range(4000)]).float().mean(dim=(1, 2, 3))
    ours = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / 32**2
    assert abs(ours.mean() - theirs.mean()) < 0.01  # 0.17, with a standard error of 0.0015
    assert abs(ours.std() - theirs.std()) < 0.01
    lying = (boxes[:, 3] - boxes[:, 2] > boxes[:, 1] - boxes[:, 0]).float().mean()
    assert 0.44 < lying < 0.53  # less than half: some are square


def test_the_share_of_a_label_is_the_share_of_the_pixels() -> None:
    brightness = np.arange(STORED, dtype=np.uint8)[:, None, None, None]
    flat = make_split(np.ascontiguousarray(np.broadcast_to(4 * brightness, (STORED, 3, 32, 32))))
    for image, label in by_position(flat, AugmentConfig(cutmix=1.0), epoch=0).values():
        stored = ((image[0] + 1) * 127.5 / 4).round().long()
        assert torch.equal(torch.bincount(stored.flatten(), minlength=STORED) / 32**2, label)
    for image, label in by_position(flat, AugmentConfig(mixup=1.0), epoch=0).values():
        brightness = (label * torch.arange(STORED)).sum()
        torch.testing.assert_close((image + 1) * 127.5 / 4, brightness.expand(3, 32, 32), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(label.sum(), torch.tensor(1.0))


def test_no_global_generator_is_touched() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    list(make_loader(noise(), EVERYTHING))
    drawn = torch.rand(1), np.random.random()
    torch.manual_seed(0)
    np.random.seed(0)
    assert (torch.rand(1), np.random.random()) == drawn


def column(values: Tensor | None) -> Tensor:
    assert values is not None
    return values
