"""Each augmentation gives an image the expected pixels, whatever the ranks, the accumulation and the block size."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms import v2

from cifar_zero.config.recipe import AugmentConfig
from cifar_zero.data import draws as draws_module
from cifar_zero.data import loaders as loader
from cifar_zero.data.augment import Augmentation
from cifar_zero.data.dataset import Split, TrainOrder
from cifar_zero.data.draws import GROUPS, Draws, draw
from cifar_zero.data.loaders import MemoryLoader
from tests.data.test_loaders import BATCH, COUNT, make_split

STORED = 60
SEED = 3
ALL = AugmentConfig(flip="random", crop=4, cutout=9, mixup=0.5, cutmix=1.0)
EVERYTHING = replace(ALL, erasing=0.5, policy="randaugment")
MANY = 20_000


POLICIES = {
    "randaugment": v2.RandAugment(),
    "autoaugment": v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10),
    "trivialaugment": v2.TrivialAugmentWide(),
}


@pytest.fixture
def few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduces the number of groups, because a policy takes a second for some tens of groups."""
    monkeypatch.setattr(draws_module, "GROUPS", 3)


def make_loader(split: Split, config: AugmentConfig, world_size: int = 1, rank: int = 0, accumulate: int = 1):
    order = TrainOrder(COUNT, BATCH, accumulate, world_size, rank, SEED)
    return MemoryLoader(split, order, None, Augmentation(config, COUNT, STORED, SEED))


def by_position(
    split: Split, config: AugmentConfig, epoch: int, world_size: int = 1, accumulate: int = 1
) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns the image and label at each position that an epoch visits, over all ranks."""
    actual: dict[int, tuple[Tensor, Tensor]] = {}
    for rank in range(world_size):
        ranks_loader = make_loader(split, config, world_size, rank, accumulate)
        ranks_loader.batch_sampler.sampler.set_epoch(epoch)  # pyright: ignore[reportOptionalMemberAccess]
        images, labels = (torch.cat(parts) for parts in zip(*ranks_loader, strict=True))
        positions = ranks_loader.batch_sampler.positions().flatten().tolist()
        actual |= dict(zip(positions, zip(images, labels, strict=True), strict=True))
    return actual


def expected(split: Split, config: AugmentConfig, draws: Draws, position: int) -> tuple[NDArray[np.float32], Tensor]:
    """Returns an augmented image, computed alone with plain indexing."""
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
    pixels = split.images[split.indices[position]].transpose(2, 0, 1)
    if draws.flip is not None and draws.flip[position]:
        pixels = pixels[:, :, ::-1]
    if draws.crop is not None:
        y, x = draws.crop[position].tolist()
        mode = "reflect" if config.padding == "reflect" else "constant"
        pixels = np.pad(pixels, ((0, 0), (config.crop,) * 2, (config.crop,) * 2), mode)[:, y : y + 32, x : x + 32]
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
        AugmentConfig(flip="alternating", crop=3, padding="reflect"),
        AugmentConfig(flip="random", crop=16),
        AugmentConfig(cutout=9),
        AugmentConfig(mixup=0.4),
        ALL,
        AugmentConfig(erasing=0.5, policy="randaugment"),
        replace(ALL, policy="autoaugment"),
        AugmentConfig(flip="random", policy="trivialaugment"),
    ],
    ids=str,
)
def test_blocks_get_what_plain_indexing_gives_each_image(config: AugmentConfig):
    split = make_split()
    draws = draw(config, COUNT, SEED, epoch=1)
    actual = by_position(split, config, epoch=1)
    assert len(actual) == COUNT // BATCH * BATCH
    for position, (image, label) in actual.items():
        expected_image, expected_label = expected(split, config, draws, position)
        assert np.array_equal(image, expected_image)
        torch.testing.assert_close(label, expected_label)


@pytest.mark.parametrize(
    ("world_size", "accumulate", "block_images"),
    [(1, 2, 7), (2, 2, 128), (4, 1, 24), (4, 2, 3)],
)
@pytest.mark.usefixtures("few_groups")
def test_ranks_accumulation_and_blocks_change_nothing(
    world_size: int, accumulate: int, block_images: int, monkeypatch: pytest.MonkeyPatch
):
    split = make_split()
    one_rank = by_position(split, EVERYTHING, epoch=1)
    monkeypatch.setitem(loader.BLOCK_IMAGES, "cpu", block_images)
    monkeypatch.setitem(loader.GROUPED_BLOCK_IMAGES, "cpu", 16 * block_images)
    monkeypatch.setattr(loader, "STRETCH_BLOCKS", 2)
    several = by_position(split, EVERYTHING, 1, world_size, accumulate)
    assert one_rank.keys() == several.keys()
    for position in one_rank:
        assert all(torch.equal(*pair) for pair in zip(one_rank[position], several[position], strict=True))


@pytest.mark.parametrize("given", [1, 3, 11])
@pytest.mark.usefixtures("few_groups")
def test_a_resumed_epoch_continues_as_if_never_stopped(given: int):
    split = make_split()
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


def test_random_flips_are_half_and_alternating_ones_flip_each_image_every_second_epoch():
    first, second = (column(draw(AugmentConfig(flip="random"), MANY, SEED, epoch).flip) for epoch in range(2))
    for flips in (first, second, first == second):
        assert abs(flips.float().mean() - 0.5) < 0.02  # 5.7 standard deviations
    flips = [column(draw(AugmentConfig(flip="alternating"), MANY, SEED, epoch).flip) for epoch in range(3)]
    assert abs(flips[0].float().mean() - 0.5) < 0.02
    assert torch.equal(flips[0], ~flips[1])
    assert torch.equal(flips[0], flips[2])


def test_draws_cover_all_places_and_differ_by_seed_and_epoch():
    draws = draw(EVERYTHING, MANY, SEED, 0)
    assert len(column(draws.crop).unique(dim=0)) == 9 * 9
    boxes = column(draws.cutout)
    sizes = boxes[:, [1, 3]] - boxes[:, [0, 2]]
    assert sizes.unique().tolist() == [5, 6, 7, 8, 9]  # a centre on the border leaves 5 of 9
    assert (boxes.amin(0).tolist(), boxes.amax(0).tolist()) == ([0, 5, 0, 5], [27, 32, 27, 32])
    assert sorted(column(draws.partner).tolist()) == list(range(MANY))
    pasted = column(draws.weight) == 1
    assert abs(pasted.float().mean() - 0.5) < 0.02
    assert (column(draws.box)[~pasted] == torch.tensor([0, 32, 0, 32])).all()
    assert len(column(draws.group).unique()) == GROUPS
    for other in (draw(EVERYTHING, MANY, SEED, 1), draw(EVERYTHING, MANY, SEED + 1, 0)):
        assert not any(torch.equal(column(one), column(two)) for one, two in zip(draws, other, strict=True))


def column(values: Tensor | None) -> Tensor:
    assert values is not None
    return values
