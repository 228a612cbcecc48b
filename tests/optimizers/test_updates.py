"""Compares steps of each optimizer with a reference, which is torch's own class, the step of the paper, or for muon_sgd
the formulas, one parameter after the other, with singular values by SVD in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cifar_module import StepSchedule
from cifar_zero.optimizers import OPTIMIZERS, Implementation
from cifar_zero.optimizers.groups import parameter_groups
from cifar_zero.schedules import Linear

STEPS = 30


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 5)
    )


def trained(make: Callable[[nn.Sequential], Callable[[], Any]]) -> list[Tensor]:
    """Returns the weights after STEPS steps. `make` returns the step function for a model."""
    net = network()
    step = make(net)
    images, labels = torch.randn(16, 3, 8, 8), torch.randint(5, (16,))
    for _ in range(STEPS):
        net.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        step()
    return [parameter.detach() for parameter in net.parameters()]


def ours(name: str, **options: Any) -> list[Tensor]:
    def make(net: nn.Sequential) -> Callable[[], Any]:
        chosen = OPTIMIZERS[name](**options)
        return chosen.build(parameter_groups(chosen, dict(net.named_parameters())), "torch").step

    return trained(make)


@pytest.mark.parametrize(("decaying", "of_biases"), [("matrices", 0.0), ("all", 0.1)])
@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        ("adam", torch.optim.Adam, {"lr": 0.003, "betas": (0.8, 0.99)}),
        ("adamw", torch.optim.AdamW, {"lr": 0.003}),
        ("rmsprop", torch.optim.RMSprop, {"lr": 0.001, "alpha": 0.9, "momentum": 0.5, "centered": True}),
        ("adagrad", torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-9}),
        ("adadelta", torch.optim.Adadelta, {"lr": 0.5, "rho": 0.8}),
    ],
)
def test_is_torchs(name: str, kind: Any, options: dict[str, Any], decaying: str, of_biases: float):
    def make(net: nn.Sequential) -> Callable[[], Any]:
        matrices = [parameter for parameter in net.parameters() if parameter.dim() > 1]
        biases = [parameter for parameter in net.parameters() if parameter.dim() == 1]
        groups = [{"params": matrices}, {"params": biases, "weight_decay": of_biases}]
        return kind(groups, weight_decay=0.1, **options).step

    actual = ours(name, weight_decay=0.1, weight_decay_on=decaying, **options)
    assert all(map(torch.equal, actual, trained(make)))


def test_lion_is_the_papers():
    """The reference follows Chen et al. 2023, algorithm 2, line by line."""
    lr, first, second, decay = 0.001, 0.9, 0.99, 0.1

    def make(net: nn.Sequential) -> Callable[[], Any]:
        means = [torch.zeros_like(parameter) for parameter in net.parameters()]

        @torch.no_grad()
        def step() -> None:
            for parameter, mean in zip(net.parameters(), means, strict=True):
                gradient: Any = parameter.grad
                update = (mean * first).add(gradient, alpha=1 - first).sign()
                if parameter.dim() > 1:
                    parameter.mul_(1 - lr * decay)
                parameter.add_(update, alpha=-lr)
                mean.mul_(second).add_(gradient, alpha=1 - second)

        return step

    actual = ours("lion", lr=lr, betas=(first, second), weight_decay=decay)
    assert all(map(torch.equal, actual, trained(make)))


def test_muon_equals_torchs_muon_with_adamw():
    """The reference is torch.optim.Muon for the hidden matrices and for convolutions as matrices, and torch.optim.AdamW
    for all other parameters. On the CPU, torch's Muon computes in bfloat16 and TorchMuon in float32."""
    common: dict[str, Any] = {"lr": 0.002, "weight_decay": 0.1}

    def make(net: nn.Sequential) -> Callable[[], Any]:
        hidden: list[Any] = [net[1].weight, net[3].weight]
        others = [net[0].weight, net[5].weight]
        biases = [parameter for parameter in net.parameters() if parameter.dim() == 1]
        flat = [nn.Parameter(weight.detach().view(len(weight), -1)) for weight in hidden]  # of the same memory
        muon = torch.optim.Muon(flat, adjust_lr_fn="match_rms_adamw", momentum=0.95, **common)
        adamw = torch.optim.AdamW([{"params": others}, {"params": biases, "weight_decay": 0.0}], **common)

        def step() -> None:
            for weight, matrix in zip(hidden, flat, strict=True):
                matrix.grad = weight.grad.view_as(matrix)
            muon.step()
            adamw.step()

        return step

    own, torchs_ = ours("muon", **common), trained(make)
    start = [parameter.detach() for parameter in network().parameters()]
    for weight, expected, first in zip(own, torchs_, start, strict=True):
        assert (weight - expected).norm() < 0.02 * (expected - first).norm()


OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.6, "ns_steps": 3, "sgd_momentum": 0.85, "weight_decay": 0.01}
OPTIONS |= {"bias_lr": 0.05, "head_lr": 0.2, "weight_decay_on": "all"}
FEW_STEPS = 10


def large_network() -> nn.Sequential:
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
    net, chosen = large_network(), OPTIMIZERS["muon_sgd"](**OPTIONS)
    nn.init.zeros_(net.get_parameter("2.weight"))
    gradients(net, 0)
    chosen.build(parameter_groups(chosen, dict(net.named_parameters())), "torch").step()
    assert all(parameter.isfinite().all() for parameter in net.parameters())
    assert net.get_parameter("2.weight").any()


@pytest.mark.parametrize("implementation", ["torch", "torch_fused"])
def test_muon_sgd_is_its_formulas(implementation: Implementation):
    """The schedule's learning rate falls to 0. A run on a GPU uses the fused form of SGD, which a CPU has too."""
    net, other = large_network(), large_network()
    chosen = OPTIMIZERS["muon_sgd"](**OPTIONS)
    optimizer = chosen.build(parameter_groups(chosen, dict(net.named_parameters())), implementation)
    schedule = StepSchedule(optimizer, Linear(total_steps=FEW_STEPS))
    momenta = {name: torch.zeros_like(parameter) for name, parameter in other.named_parameters()}
    for step in range(FEW_STEPS):
        gradients(net, step)
        optimizer.step()
        schedule.step()
        gradients(other, step)
        for name, parameter in other.named_parameters():
            gradient: Any = parameter.grad
            by_muon = name.endswith("weight") and name != "9.weight"
            share = 1 - step / FEW_STEPS
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
