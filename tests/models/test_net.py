"""The tutorial's Net: its layers, shapes and scores."""

from typing import Any

import torch

from cifar_zero import models


def test_net_has_the_tutorials_layers():
    net = models.build("net", num_classes=10)
    sizes = {name: sum(p.numel() for p in layer.parameters()) for name, layer in net.named_children()}
    assert sizes == {"conv1": 456, "pool": 0, "conv2": 2416, "fc1": 48120, "fc2": 10164, "fc3": 850}
    assert sum(sizes.values()) == 62_006


def test_net_has_the_tutorials_shapes():
    net: Any = models.build("net", num_classes=10)
    shapes = []
    for layer in (net.conv1, net.pool, net.conv2, net.fc1, net.fc3):
        layer.register_forward_hook(lambda _layer, _inputs, output: shapes.append(tuple(output.shape)))
    net(torch.zeros(2, 3, 32, 32))
    assert shapes == [(2, 6, 28, 28), (2, 6, 14, 14), (2, 16, 10, 10), (2, 16, 5, 5), (2, 120), (2, 10)]


def test_net_computes_the_plain_formula():
    torch.manual_seed(0)
    net: Any = models.build("net", num_classes=100)
    images = torch.randn(3, 3, 32, 32)
    f = torch.nn.functional
    x = f.max_pool2d(f.conv2d(images, net.conv1.weight, net.conv1.bias).relu(), 2)
    x = f.max_pool2d(f.conv2d(x, net.conv2.weight, net.conv2.bias).relu(), 2).reshape(3, 400)
    for layer in (net.fc1, net.fc2):
        x = (x @ layer.weight.T + layer.bias).relu()
    torch.testing.assert_close(net(images), x @ net.fc3.weight.T + net.fc3.bias)
