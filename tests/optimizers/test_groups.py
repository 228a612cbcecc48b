"""Parameter groups, and a checkpoint of other groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.optimizers.groups import keep_own_options, lay_like_parameters, parameter_groups


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def optimizer(net: nn.Module, name: str = "adam", **options: Any) -> torch.optim.Optimizer:
    chosen = OPTIMIZERS[name](**options)
    made = chosen.build(parameter_groups(chosen, dict(net.named_parameters())), "torch")
    made.register_load_state_dict_pre_hook(keep_own_options)
    return made


def test_norms_and_biases_do_not_decay():
    decaying, others = optimizer(network(), weight_decay=0.1).param_groups
    assert (decaying["weight_decay"], decaying["param_names"]) == (0.1, ["0.weight", "2.weight"])
    assert (others["weight_decay"], others["param_names"]) == (0, ["0.bias", "1.weight", "1.bias", "2.bias"])


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "weight_decay_on": "all"}])
def test_one_group_where_all_are_alike(options: dict[str, Any]):
    net = network()
    (group,) = optimizer(net, **options).param_groups
    assert group["params"] == [*net.parameters()]
    assert group["param_names"] == [name for name, _ in net.named_parameters()]


@pytest.mark.parametrize(("before", "now"), [(0.1, 0.0), (0.0, 0.1)])
def test_the_state_of_other_groups_is_loaded(before: float, now: float):
    """One group is loaded into two, and two into one: each parameter gets its own state."""
    net = network()
    first, second = optimizer(net, weight_decay=before, lr=0.5), optimizer(net, weight_decay=now)
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    first.step()
    second.load_state_dict(first.state_dict())
    assert len(second.param_groups) == (2 if now else 1)
    assert {group["lr"] for group in second.param_groups} == {0.5}
    assert second.param_groups[0]["weight_decay"] == now
    assert all(torch.equal(second.state[p]["exp_avg"], first.state[p]["exp_avg"]) for p in net.parameters())


def test_a_loaded_state_lies_as_its_parameter_does():
    net, other = nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2)
    other.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    first, second = optimizer(net), optimizer(other)
    second.register_load_state_dict_post_hook(lay_like_parameters)
    net(torch.randn(1, 3, 4, 4)).sum().backward()
    first.step()
    second.load_state_dict(first.state_dict())
    loaded = second.state[other.weight]["exp_avg"]
    assert loaded.stride() == other.weight.stride() != net.weight.stride()
    assert torch.equal(loaded, first.state[net.weight]["exp_avg"])


def test_regrouped_parameters_keep_their_learning_rate():
    """Muon's checkpoint, whose groups have separate rates, is loaded into groups that weight decay splits otherwise."""
    before = {"lr": 0.1, "bias_lr": 0.2, "head_lr": 0.2}
    first = optimizer(network(), "muon_sgd", **before, weight_decay_on="all")
    second = optimizer(network(), "muon_sgd", **before, weight_decay=0.01)
    assert len(first.param_groups) != len(second.param_groups)
    for group in second.param_groups:
        group["lr"] = 1.0
    second.load_state_dict(first.state_dict())
    rates = {name: group["lr"] for group in second.param_groups for name in group["param_names"]}
    expected = {"0.weight": 0.1, "0.bias": 0.2, "1.weight": 0.2, "1.bias": 0.2, "2.weight": 0.2, "2.bias": 0.2}
    assert rates == expected
