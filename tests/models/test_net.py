"""Compares the scores of the tutorial's Net with its formula."""

from typing import Any

import torch

from cifar_zero import models


def test_net_computes_the_plain_formula():
    torch.manual_seed(0)
    net: Any = models.build("net", num_classes=10)
    images = torch.randn(3, 3, 32, 32)
    f = torch.nn.functional
    x = f.max_pool2d(f.conv2d(images, net.conv1.weight, net.conv1.bias).relu(), 2)
    x = f.max_pool2d(f.conv2d(x, net.conv2.weight, net.conv2.bias).relu(), 2).reshape(3, 400)
    for layer in (net.fc1, net.fc2):
        x = (x @ layer.weight.T + layer.bias).relu()
    torch.testing.assert_close(net(images), x @ net.fc3.weight.T + net.fc3.bias)
