"""Work on whole batches of images, on whatever device they are."""

from __future__ import annotations

import torch
from torch import Tensor

MEAN = 0.5
STD = 0.5
"""Of the PyTorch CIFAR tutorial: pixels from 0 to 1 become -1 to 1, the same in each channel."""


def normalize(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 pixels (m, 3, 32, 32) -> [-1, 1] in `dtype`, bit by bit what torchvision's ToTensor and Normalize give.

    Floating-point images have been normalised by the torch loader: they are only cast. The arithmetic is float32
    whatever `dtype` is, as pixels 1/255 apart would fall together in bfloat16.
    """
    if not images.is_floating_point():
        images = images.float().div(255).sub(MEAN).div(STD)
    return images.to(dtype)
