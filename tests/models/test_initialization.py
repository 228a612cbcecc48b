"""Initial weights have the variances of the papers, and are the same on every device."""

import math
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cifar_zero import build_model
from cifar_zero.config.recipe import Choice, LoRAConfig, Recipe
from cifar_zero.models.initialization import initialize


@pytest.mark.parametrize("scheme", ["he", "xavier"])
def test_variances_are_those_of_the_papers(scheme: str):
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64), nn.Linear(300, 200))
    nn.init.constant_(net[1].weight, 3.0)
    initialize(net, scheme, 0)
    for layer, fan_in, fan_out in ((net[0], 16 * 9, 64 * 9), (net[2], 300, 200)):
        variance = 2 / fan_in if scheme == "he" else 2 / (fan_in + fan_out)
        assert layer.weight.var().item() == pytest.approx(variance, rel=0.05)
        assert (layer.weight.abs().max() <= math.sqrt(3 * variance)) == (scheme == "xavier")  # uniform, or with tails
        assert not layer.bias.any()
    assert (net[1].weight == 3).all()


def test_the_seed_decides_the_initial_weights():
    def start(seed: int) -> torch.Tensor:
        net: Any = build_model.create_model(Recipe(model=Choice("mlp"), init="he", seed=seed), 10)
        return net[1].weight

    assert torch.equal(start(seed=0), start(seed=0))
    assert not torch.equal(start(seed=0), start(seed=1))


class Draws(TorchDispatchMode):
    """Records the devices on which random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.devices = set[torch.device]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.devices.add(made.device)
        return made


@pytest.mark.parametrize(("model", "scheme"), [("net", "he"), ("vit_tiny", "default")])
def test_weights_on_a_gpu_are_those_of_a_cpu(model: str, scheme: str):
    """Baseline, DDP and ZeRO build the model on the GPU. fsdp2 and a machine without a GPU build it on the CPU."""
    with FakeTensorMode(), Draws() as draws, torch.device("cuda"):
        net = build_model.create_model(Recipe(model=Choice(model), init=cast(Any, scheme), lora=LoRAConfig(rank=2)), 10)
    assert {parameter.device.type for parameter in net.parameters()} == {"cuda"}
    assert draws.devices == {torch.device("cpu")}
