"""What a model sees of an image: the size of its inputs and their normalisation; no torch."""

import math
from typing import NamedTuple

from cifar_zero.core.errors import UsageError
from cifar_zero.models import IMAGE_SHAPE

NORMALIZATIONS = {
    "half": "0.5,0.5",  # of the PyTorch CIFAR tutorial: pixels from -1 to 1
    "cifar": "0.4914,0.4822,0.4465,0.2470,0.2435,0.2616",  # of CIFAR-10's training images
    "imagenet": "0.485,0.456,0.406,0.229,0.224,0.225",  # of ImageNet's, as torchvision's weights expect
}
"""Mean and standard deviation of the pixels, from 0 to 1: of all channels, or three of each."""


class Inputs(NamedTuple):
    """Square RGB images whose pixels, from 0 to 1, become (pixel - mean) / std."""

    side: int  # height and width in pixels
    mean: tuple[float, ...]  # of all channels, or of red, green and blue
    std: tuple[float, ...]

    def as_many(self, images: int) -> int:
        """Returns the number of these images, at least one, that have as many pixels as images of CIFAR's size."""
        return max(1, images * IMAGE_SHAPE[1] * IMAGE_SHAPE[2] // self.side**2)


def inputs(side: int = IMAGE_SHAPE[1], normalization: str = "half") -> Inputs:
    """Returns the inputs of --data.image_size and --data.normalize; raises UsageError if the latter is invalid."""
    try:
        numbers = [float(number) for number in NORMALIZATIONS.get(normalization, normalization).split(",")]
    except ValueError:
        numbers = []
    channels = len(numbers) // 2
    mean, std = tuple(numbers[:channels]), tuple(numbers[channels:])
    if len(numbers) not in (2, 6) or not all(map(math.isfinite, numbers)) or min(std) <= 0:
        known = ", ".join(NORMALIZATIONS)
        raise UsageError(f"--data.normalize {normalization}: give {known}, or mean,std as 2 or 6 numbers, std above 0")
    return Inputs(side, mean, std)


PLAIN = inputs()  # images of CIFAR's size with pixels from -1 to 1
