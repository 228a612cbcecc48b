"""Compares the model of the speed records with a second implementation of the same model."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cifar_zero import models


def images() -> Tensor:
    """Returns smooth images, whose neighbouring pixels are similar: float32 (64, 3, 32, 32), between -1 and 1."""
    noise = torch.randn(64, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    return F.interpolate(noise, (32, 32), mode="bilinear").tanh() * torch.tensor([1.0, 0.5, 0.25])[:, None, None]


def test_parameters_are_the_references():
    """The number is counted from airbench94_muon.py. Its model has 24 filters of 2 x 2 pixels, six convolutions, six
    batch norms and one matrix."""
    net = models.build("speednet", 10)
    assert sum(parameter.numel() for parameter in net.parameters()) == 1_972_792
    frozen = {name for name, parameter in net.named_parameters() if not parameter.requires_grad}
    assert frozen == {"whiten.weight", *(f"blocks.{i}.norm{j}.weight" for i in range(3) for j in (1, 2))}


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


@pytest.mark.parametrize("training", [True, False])
def test_scores_are_those_of_a_second_formulation(training: bool):
    torch.manual_seed(0)
    net = models.build("speednet", 7, width=0.25).train(training)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    for name in state:
        if name.endswith(("running_mean", "running_var", "bias")):
            state[name] = torch.rand_like(state[name]) + 0.5
    net.load_state_dict(state)

    def normed(x: Tensor, name: str) -> Tensor:
        mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        if training:
            var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
        x = (x - mean[:, None, None]) / (var[:, None, None] + 1e-12).sqrt() + state[f"{name}.bias"][:, None, None]
        return gelu(x)

    x = gelu(F.conv2d(images(), state["whiten.weight"], state["whiten.bias"]))
    for i in range(3):
        x = F.conv2d(x, state[f"blocks.{i}.conv1.weight"], padding=1)
        side = x.shape[2] // 2
        x = x[:, :, : 2 * side, : 2 * side].unflatten(3, (side, 2)).unflatten(2, (side, 2)).amax((3, 5))
        x = normed(x, f"blocks.{i}.norm1")
        x = normed(F.conv2d(x, state[f"blocks.{i}.conv2.weight"], padding=1), f"blocks.{i}.norm2")
    assert x.shape == (64, 64, 3, 3)
    expected = x.amax((2, 3)) @ state["head.weight"].T / (16 * x.shape[1] ** 0.5)
    assert torch.allclose(net(images()), expected, rtol=1e-4, atol=1e-5)
