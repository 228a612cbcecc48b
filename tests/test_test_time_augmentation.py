"""Compares test-time augmentation with the average of views that are made one by one."""

import torch
from torch import Tensor

from cifar_module import averaged_scores
from cifar_zero.config.recipe import Views


def network(images: Tensor) -> Tensor:
    """Returns scores in which each pixel has a different weight."""
    weights = torch.randn(images[0].numel(), 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (images.double().flatten(1) @ weights).tanh()


def test_averages():
    seen = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    before, after = [1, *range(31)], [*range(1, 32), 30]  # the border's neighbour pixel is reflected into the image
    views = {"none": [(seen, 1.0)], "mirror": [(seen, 0.5), (seen.flip(3), 0.5)]}
    up_left, down_right = seen[:, :, before][:, :, :, before], seen[:, :, after][:, :, :, after]
    moved = [(view, 0.125) for image in (up_left, down_right) for view in (image, image.flip(3))]
    views["mirror_translate"] = [(seen, 0.25), (seen.flip(3), 0.25), *moved]
    kinds: tuple[Views, ...] = ("none", "mirror", "mirror_translate")
    for kind in kinds:
        expected = torch.stack([weight * network(view) for view, weight in views[kind]]).sum(0).float()
        assert torch.allclose(averaged_scores(network, seen, kind), expected, atol=1e-6), kind
