"""Compares test-time augmentation with the average of views that are made one by one."""

import torch
from torch import Tensor, nn

from cifar_module import averaged_scores
from cifar_zero.config.recipe import Views


def test_averages():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), nn.Tanh())
    seen = torch.rand(5, 3, 32, 32) * 2 - 1
    before, after = [1, *range(31)], [*range(1, 32), 30]  # the border's neighbour pixel is reflected into the image
    up_left, down_right = seen[:, :, before][:, :, :, before], seen[:, :, after][:, :, :, after]
    centre, *moved = ((net(view) + net(view.flip(3))) / 2 for view in (seen, up_left, down_right))
    expected: dict[Views, Tensor] = {"none": net(seen), "mirror": centre}
    expected["mirror_translate"] = centre / 2 + sum(moved) / 4
    for views, scores in expected.items():
        torch.testing.assert_close(averaged_scores(net, seen, views), scores, rtol=0, atol=1e-6)
