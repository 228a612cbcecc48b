"""Compares muon_sgd with the formulas, one parameter after the other, with singular values by SVD in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cifar_module import StepSchedule
from cifar_zero.optimizers import OPTIMIZERS, Implementation
from cifar_zero.optimizers.groups import parameter_groups
from cifar_zero.schedules import Linear

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.6, "ns_steps": 3, "sgd_momentum": 0.85, "weight_decay": 0.01}
OPTIONS |= {"bias_lr": 0.05, "head_lr": 0.2, "weight_decay_on": "all"}
STEPS = 10


def network() -> nn.Sequential:
    """Returns a model with filters of two shapes, one of which it has twice, and with wide and tall matrices."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.GELU(), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)),
        *(nn.Flatten(), nn.Linear(216, 8), nn.GELU(), nn.Linear(8, 30), nn.GELU(), nn.Linear(30, 5)),
    ).double()


def gradients(net: nn.Sequential, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(16, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (16,), generator=generator)
    net.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()


def polynomial_of_singular_values(matrix: Tensor, steps: int) -> Tensor:
    """Returns a Newton-Schulz iteration's result: a s + b s^3 + c s^5 for each singular value s."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


def test_a_layer_may_begin_with_zeros():
    net, chosen = network(), OPTIMIZERS["muon_sgd"](**OPTIONS)
    nn.init.zeros_(net.get_parameter("2.weight"))
    gradients(net, 0)
    chosen.build(parameter_groups(chosen, dict(net.named_parameters())), "torch").step()
    assert all(parameter.isfinite().all() for parameter in net.parameters())
    assert net.get_parameter("2.weight").any()


@pytest.mark.parametrize("implementation", ["torch", "torch_fused"])
def test_updates_are_the_formulas(implementation: Implementation):
    """The schedule's learning rate falls to 0. A run on a GPU uses the fused form of SGD, which a CPU has too."""
    net, other = network(), network()
    chosen = OPTIMIZERS["muon_sgd"](**OPTIONS)
    optimizer = chosen.build(parameter_groups(chosen, dict(net.named_parameters())), implementation)
    schedule = StepSchedule(optimizer, Linear(total_steps=STEPS))
    momenta = {name: torch.zeros_like(parameter) for name, parameter in other.named_parameters()}
    for step in range(STEPS):
        gradients(net, step)
        optimizer.step()
        schedule.step()
        gradients(other, step)
        for name, parameter in other.named_parameters():
            gradient: Any = parameter.grad
            by_muon = name.endswith("weight") and name != "9.weight"
            share = 1 - step / STEPS
            rate = 0.1 if by_muon else 0.2 if name == "9.weight" else 0.05
            kept = 0.6 if by_muon else 0.85
            with torch.no_grad():
                if not by_muon:
                    gradient = gradient + 0.01 / rate * parameter
                momenta[name] = kept * momenta[name] + gradient
                update = gradient + kept * momenta[name]
                if by_muon:
                    update = polynomial_of_singular_values(update.flatten(1), 3).view_as(update)
                    parameter *= len(parameter) ** 0.5 / parameter.norm()
                parameter -= share * rate * update
    for (name, parameter), expected in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(parameter, expected, atol=1e-6), name
