"""Test-time augmentation: the scores of several views of an image, averaged."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from cifar_zero.config.flags import Views
from cifar_zero.data.augment import normalize


def averaged_scores(model: Callable[[Tensor], Tensor], images: Tensor, views: Views) -> Tensor:
    """Returns class scores (N, classes) in float32, averaged over one pass of the model for each view.

    The views are those of airbench (Jordan 2024, arXiv 2404.00498; github.com/KellerJordan/cifar10-airbench, `infer`).

    Args:
        model: returns class scores of normalised images.
        images: uint8 (N, 3, H, W), or float in [-1, 1].
        views: none: the image alone. mirror: with its mirror image. mirror_translate: these two with weight 1/4 each,
            and each of them moved by a pixel up and left, and down and right, with weight 1/8 each, padded by
            reflection.
    """
    if views == "none":
        return model(images).float()
    images = normalize(images)
    scores = _mirrored(model, images)
    if views == "mirror":
        return scores
    height, width = images.shape[2:]
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    moved = _mirrored(model, padded[:, :, :height, :width]) + _mirrored(model, padded[:, :, 2:, 2:])
    return 0.5 * scores + 0.25 * moved


def _mirrored(model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    return 0.5 * model(images).float() + 0.5 * model(images.flip(3)).float()
