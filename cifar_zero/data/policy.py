"""Transforms of torchvision and of the user, which draw once a call: applied to groups of images."""

from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms import v2

from cifar_zero.config.recipe import AugmentConfig
from cifar_zero.core import user_code
from cifar_zero.core.errors import UsageError, short

Transform = Callable[[Tensor], Tensor]
"""Maps uint8 images (N, 3, H, W) to the same shape, as torchvision.transforms.v2: it draws once for a call."""


def transforms_of(config: AugmentConfig) -> list[Transform]:
    """Returns the transforms of --augment. Raises UsageError: the command line does not name the user's."""
    transforms: list[Transform] = []
    if config.policy != "none":
        cifar = v2.AutoAugmentPolicy.CIFAR10
        policies = {"randaugment": v2.RandAugment, "trivialaugment": v2.TrivialAugmentWide}
        transforms.append(v2.AutoAugment(cifar) if config.policy == "autoaugment" else policies[config.policy]())
    if config.transform:
        transforms.append(user_code.allowed(config.transform, "--augment.transform"))
    return transforms


def in_groups(images: Tensor, seeds: Tensor, transforms: list[Transform]) -> Tensor:
    """Returns images uint8 (n, 3, H, W) after the transforms, called once for all images with the same seed, int64 (n,)
    on the CPU. The generators, from which torchvision draws, are seeded for each group, and restored."""
    result = torch.empty_like(images)
    with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []):
        for seed in seeds.unique().tolist():
            members = (seeds == seed).nonzero().flatten().to(images.device, non_blocking=True)
            torch.manual_seed(seed)
            group = images[members]
            for transform in transforms:
                group = transform(group)
            if (group.shape, group.dtype) != ((len(members), *images.shape[1:]), images.dtype):
                raise ValueError(f"returns {group.dtype} {tuple(group.shape)} for {len(members)} uint8 images")
            result[members] = group
    return result


def check_transform(config: AugmentConfig, side: int) -> None:
    """Tries the user's transform on a few images. Raises UsageError: the command line does not name it, it fails, it
    changes the shape or the type of the images, or what it does to an image depends on the others."""
    (transform,) = transforms_of(AugmentConfig(transform=config.transform))
    flag = f"--augment.transform {config.transform}"
    brightness = torch.tensor([64, 128, 192, 255])[:, None, None, None]
    images = (torch.rand(4, 3, side, side, generator=torch.Generator().manual_seed(0)) * brightness).byte()
    seeds = torch.zeros(4, dtype=torch.int64)
    try:
        together, alone = (in_groups(images[:count], seeds[:count], [transform]) for count in (4, 1))
    except Exception as error:  # a user's code may raise anything
        raise UsageError(f"{flag}: {user_code.where(error)}{type(error).__name__}: {short(error)}") from error
    if not torch.equal(together[:1], alone):
        raise UsageError(f"{flag}: treats an image alone otherwise than with others: draw once for all of a call")
