"""Initial weights have the variances of the papers, and are the same on every device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cifar_module import CIFARModule
from cifar_zero import models
from cifar_zero.checkpoints import network
from cifar_zero.config.command_line import parse
from cifar_zero.config.recipe import Choice, LoRAConfig, Recipe
from cifar_zero.models.initialization import initialize
from cifar_zero.training.resolve import make_run

VARIANCES: dict[str, Callable[[int, int], float]] = {
    "he": lambda fan_in, fan_out: 2 / fan_in,
    "xavier": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
}


@pytest.mark.parametrize("scheme", VARIANCES)
def test_variances_are_those_of_the_papers(scheme: str):
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64), nn.Linear(300, 200))
    for layer in net:
        nn.init.constant_(layer.bias, 3.0)
    norm = {name: value.clone() for name, value in net[1].state_dict().items()}
    initialize(net, scheme, 0)
    for layer, fans in ((net[0], (16 * 9, 64 * 9)), (net[2], (300, 200))):
        weight = layer.weight
        variance = VARIANCES[scheme](*fans)
        assert weight.var().item() == pytest.approx(variance, rel=0.05)
        assert abs(weight.mean().item()) < 4 * math.sqrt(variance / weight.numel())
        assert (weight.abs().max() <= math.sqrt(3 * variance)) == (scheme == "xavier")  # uniform, or with tails
        assert not layer.bias.any()
    assert all(torch.equal(value, norm[name]) for name, value in net[1].state_dict().items())


def test_default_leaves_the_weights_as_they_were_drawn():
    torch.manual_seed(0)
    net = models.build("net", 10)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    initialize(net, "default", 0)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(("activation", "scheme"), [("relu", "he"), ("tanh", "xavier")])
def test_deep_perceptrons_keep_their_signal(activation: str, scheme: str):
    """The schemes' purpose: 20 layers neither vanish nor explode the signal, which vanishes with torch's default."""
    torch.manual_seed(0)
    images, spreads = torch.randn(16, 3, 32, 32), {}
    for drawn in ("default", scheme):
        net = models.build("mlp", 10, hidden=[256] * 20, activation=activation)
        initialize(net, drawn, 0)
        spreads[drawn] = net(images).std(dim=0).mean().item()  # over the images: how much they still differ
    assert spreads["default"] < 1e-3
    assert 0.02 < spreads[scheme] < 10


def test_the_seed_decides_the_initial_weights():
    def start(*flags: str) -> torch.Tensor:
        flags = ("--data.source", "digits", "--model", "mlp", "--model.hidden", "[8]", "--devices", "1", *flags)
        built = CIFARModule(make_run(parse([*flags])), num_classes=10)
        built.configure_model()
        net: Any = built.net
        return net[1].weight

    assert torch.equal(start("--init", "he"), start("--init", "he"))
    assert not torch.equal(start("--init", "he"), start("--init", "he", "--seed", "1"))
    assert not torch.equal(start("--init", "he"), start())


class Draws(TorchDispatchMode):
    """Notes where random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.devices = set[torch.device]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.devices.add(made.device)
        return made


@pytest.mark.parametrize("model", ["net", "speednet", "resnet18", "vit_tiny"])
@pytest.mark.parametrize("scheme", ["default", "he"])
def test_weights_on_a_gpu_are_those_of_a_cpu(model: str, scheme: str):
    """Baseline, DDP and ZeRO build the model on the GPU, fsdp2 and a machine without one on the CPU."""
    with FakeTensorMode(), Draws() as draws, torch.device("cuda"):
        net = network.build(Recipe(model=Choice(model), init=cast(Any, scheme), lora=LoRAConfig(rank=2)), 10)
    assert {parameter.device.type for parameter in net.parameters()} == {"cuda"}
    assert draws.devices == {torch.device("cpu")}
