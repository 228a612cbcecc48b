"""muon_sgd compared with the formulas, one parameter after the other, with singular values by SVD in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cifar_module import StepSchedule
from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.optimizers.groups import parameter_groups
from cifar_zero.optimizers.torch_updates import orthogonalized
from cifar_zero.schedules import Linear

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.6, "ns_steps": 3, "sgd_momentum": 0.85, "weight_decay": 0.01}
OPTIONS |= {"bias_lr": 0.05, "head_lr": 0.2, "weight_decay_on": "all", "first_bias_share": 0.5}
STEPS = 10


def network() -> nn.Sequential:
    """Filters of two shapes, one of them twice; wide and tall matrices."""
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


@pytest.mark.parametrize("shape", [(6, 54), (30, 8), (8, 8)])
def test_orthogonalized(shape: tuple[int, int]):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for steps in (3, 5):
        expected = torch.stack([polynomial_of_singular_values(matrix, steps) for matrix in matrices])
        assert torch.allclose(orthogonalized(matrices, steps, "cpu"), expected, atol=1e-6)
    values = torch.linalg.svdvals(orthogonalized(matrices, 5, "cpu"))
    assert values.min() > 0.3
    assert values.max() < 1.3
    in_bfloat16 = torch.linalg.svdvals(orthogonalized(matrices, 5, "cuda"))  # as on a GPU
    assert 0.001 < (in_bfloat16 - values).abs().max() < 0.1
    assert torch.allclose(orthogonalized(matrices, 0, "cpu").norm(dim=(1, 2)), torch.tensor(min(shape) ** 0.5).double())


@pytest.mark.parametrize(
    ("normalize", "every", "muon"), [(True, 1, True), (True, 3, True), (False, 1, True), (True, 1, False)]
)
def test_updates_are_the_formulas(normalize: bool, every: int, muon: bool):
    """The schedule falls to 0; for the first layer's bias it does so in half the steps."""
    net, other = network(), network()
    chosen = OPTIMIZERS["muon_sgd"](**{**OPTIONS, "normalize": normalize, "normalize_every": every, "muon": muon})
    optimizer = chosen.build(parameter_groups(chosen, dict(net.named_parameters())), "torch")
    schedule = StepSchedule(optimizer, Linear(total_steps=STEPS))
    momenta = {name: torch.zeros_like(parameter) for name, parameter in other.named_parameters()}
    for step in range(STEPS):
        gradients(net, step)
        optimizer.step()
        schedule.step()
        gradients(other, step)
        for name, parameter in other.named_parameters():
            gradient: Any = parameter.grad
            filters = name.endswith("weight") and name != "9.weight"
            by_muon = filters and muon
            share = max(0.0, 1 - step / (STEPS / 2 if name == "0.bias" else STEPS))
            rate = 0.1 if filters else 0.2 if name == "9.weight" else 0.05
            kept = 0.6 if by_muon else 0.85
            with torch.no_grad():
                if not by_muon:
                    gradient = gradient + 0.01 / rate * parameter
                momenta[name] = kept * momenta[name] + gradient
                update = gradient + kept * momenta[name]
                if by_muon:
                    update = polynomial_of_singular_values(update.flatten(1), 3).view_as(update)
                    if normalize and step % every == 0:
                        parameter *= len(parameter) ** 0.5 / parameter.norm()
                parameter -= share * rate * update
    for (name, parameter), expected in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(parameter, expected, atol=1e-6), name
    group = optimizer.param_groups[0]
    assert (group["muon"], group["initial_lr"]) == (muon, 0.1)  # whose rate the curves show


def test_a_resumed_run_continues_to_count_the_steps():
    """Of filters that are normalised before steps 0, 3, 6 and 9: the third step after a restart at 4 is the 6th."""

    def trained(restart: int) -> list[Tensor]:
        net, chosen = network(), OPTIMIZERS["muon_sgd"](**{**OPTIONS, "first_bias_share": 1.0, "normalize_every": 3})
        groups = parameter_groups(chosen, dict(net.named_parameters()))
        optimizer = chosen.build(groups, "torch")
        for step in range(STEPS):
            if step == restart:
                state, optimizer = optimizer.state_dict(), chosen.build(groups, "torch")
                optimizer.load_state_dict(state)
            gradients(net, step)
            optimizer.step()
        return [*net.parameters()]

    pairs = zip(trained(restart=4), trained(restart=-1), strict=True)
    assert all(torch.equal(resumed, whole) for resumed, whole in pairs)


def test_groups():
    chosen = OPTIMIZERS["muon_sgd"](**{**OPTIONS, "weight_decay_on": "matrices"})
    groups = parameter_groups(chosen, dict(network().named_parameters()))
    named = [
        (group["param_names"], {key: group[key] for key in group if not key.startswith("param")}) for group in groups
    ]
    assert named == [
        (["0.weight", "2.weight", "3.weight", "5.weight", "7.weight"], {"muon": True}),
        (["0.bias"], {"lr": 0.05, "schedule_share": 0.5}),
        (["2.bias", "3.bias", "5.bias", "7.bias", "9.bias"], {"lr": 0.05}),
        (["9.weight"], {"lr": 0.2, "weight_decay": 0.01 / 0.2}),
    ]


def test_a_share_for_a_bias_that_is_not_there():
    net = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.Linear(6, 5))
    with pytest.raises(UsageError, match="first layer has no bias"):
        parameter_groups(OPTIMIZERS["muon_sgd"](**{**OPTIONS, "first_bias_share": 0.5}), dict(net.named_parameters()))


def test_a_share_that_is_no_whole_number_of_steps():
    """7 steps in 0.3 of 23: at no step the rate of half a step before or after."""
    parameter = nn.Parameter(torch.zeros(1))
    groups = [{"params": [parameter], "muon": True}, {"params": [nn.Parameter(torch.zeros(1))], "schedule_share": 0.3}]
    optimizer = OPTIMIZERS["muon_sgd"](lr=1.0).build(groups, "torch")
    schedule = StepSchedule(optimizer, Linear(total_steps=23))
    for step in range(10):
        assert schedule.get_lr() == pytest.approx([1 - step / 23, max(0, 1 - step / 0.3 / 23)])
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optimizer.ns_steps -1", "--optimizer.ns_steps must be at least 0 and under 100, not -1"),
        ("--optimizer.normalize_every 0", "--optimizer.normalize_every must be at least 1, not 0"),
        ("--optimizer.head_lr -1", "--optimizer.head_lr must be at least 0, not -1.0"),
        ("--optimizer.sgd_momentum 1", "--optimizer.sgd_momentum must be at least 0 and under 1, not 1.0"),
        ("--optimizer.first_bias_share 0", "--optimizer.first_bias_share must be over 0 and at most 1, not 0.0"),
    ],
)
def test_mistakes_are_one_clear_line(flags: str, message: str):
    with pytest.raises(UsageError) as error:
        command_line.parse(["--optimizer", "muon_sgd", *flags.split()])
    assert str(error.value) == message
