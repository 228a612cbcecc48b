"""Tests the loading of a checkpoint with other parameter groups."""

from typing import Any

import pytest
import torch
from torch import nn

from cifar_zero.optimizers import Adam
from cifar_zero.optimizers.groups import keep_own_options, match_strides, parameter_groups


def adam(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    chosen = Adam(**options)
    return chosen.build(parameter_groups(chosen, dict(net.named_parameters())), "torch")


@pytest.mark.parametrize(("before", "now"), [(0.1, 0.0), (0.0, 0.1)])
def test_the_state_of_other_groups_is_loaded(before: float, now: float):
    """One group is loaded into two groups, and two groups into one. Each parameter gets its own state."""
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    first, second = adam(net, weight_decay=before, lr=0.5), adam(net, weight_decay=now)
    second.register_load_state_dict_pre_hook(keep_own_options)
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    first.step()
    second.load_state_dict(first.state_dict())
    assert len(second.param_groups) == (2 if now else 1)
    assert {group["lr"] for group in second.param_groups} == {0.5}
    assert second.param_groups[0]["weight_decay"] == now
    assert all(torch.equal(second.state[p]["exp_avg"], first.state[p]["exp_avg"]) for p in net.parameters())


@pytest.mark.parametrize(
    ("data", "strides"),
    [
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.ones(6, 4)[::2], (4, 1)),  # a slice
    ],
)
def test_the_loaded_state_has_the_strides_of_new_state(data: torch.Tensor, strides: tuple[int, ...]):
    parameter = nn.Parameter(data)
    parameter.grad = torch.ones_like(parameter)
    first, second = torch.optim.Adam([parameter]), torch.optim.Adam([parameter])
    second.register_load_state_dict_post_hook(match_strides)
    first.step()
    saved = first.state_dict()
    saved["state"][0] = {key: value.contiguous() for key, value in saved["state"][0].items()}
    second.load_state_dict(saved)
    for key in ("exp_avg", "exp_avg_sq"):
        actual, expected = second.state[parameter][key], first.state[parameter][key]
        assert actual.stride() == expected.stride() == strides
        assert torch.equal(actual, expected)
