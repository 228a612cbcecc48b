"""The parameter groups of an optimizer: who decays, who is Muon's, who has a learning rate of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers.muon import Muon, MuonSGD


def parameter_groups(optimizer: Any, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups that an optimizer is made for, in the order in which the network comes to them, those with
    a learning rate of their own last.

    Where there are several, each has `param_names`, as torch's optimizers call them (2.6 and later): a checkpoint then
    says which numbers are whose.

    Args:
        optimizer: its options, a dataclass of the registry.
        parameters: of the network, by name and in its order; sharded ones too. Frozen ones are in no group.
    """
    dimensions = {name: _dimensions(parameter) for name, parameter in parameters.items()}
    weights = layer_weights(dimensions)
    by_muon: set[str] = set()
    if isinstance(optimizer, Muon):
        by_muon = hidden_matrices(dimensions)
    if isinstance(optimizer, MuonSGD):
        by_muon = {*weights[:-1]}
        if optimizer.first_bias_share < 1 and (not weights or first_bias(weights) not in dimensions):
            raise UsageError("--optimizer.first_bias_share: the network's first layer has no bias, leave it out")
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        decays = optimizer.weight_decay > 0 and (optimizer.weight_decay_on == "all" or dimensions[name] >= 2)
        options: dict[str, Any] = {"muon": True} if name in by_muon else {}
        if isinstance(optimizer, MuonSGD) and name not in by_muon:
            options = sgd_options(optimizer, name, weights, decays)
        elif optimizer.weight_decay and not decays:
            options["weight_decay"] = 0.0
        group = groups.setdefault((*options.items(),), {**options, "params": [], "param_names": []})
        group["params"].append(parameter)
        group["param_names"].append(name)
    if len(groups) == 1:
        next(iter(groups.values())).pop("param_names")
    # The curves show the first one's rate: --optimizer.lr.
    return sorted(groups.values(), key=lambda group: "lr" in group)


def hidden_matrices(dimensions: Mapping[str, int]) -> set[str]:
    """The weights of linear and convolution layers between the first one and the last one of a network.

    Muon is not for what takes in the images or gives out the classes, nor for embeddings, whose rows are apart (Jordan
    et al. 2024, kellerjordan.github.io/posts/muon).

    Args:
        dimensions: of all parameters, by name and in the network's order.
    """
    return {*layer_weights(dimensions)[1:-1]}


def layer_weights(dimensions: Mapping[str, int]) -> list[str]:
    """The weights of linear and convolution layers; see `hidden_matrices`."""
    return [name for name, number in dimensions.items() if number in (2, 4) and name.endswith("weight")]


def sgd_options(optimizer: MuonSGD, name: str, weights: Sequence[str], decays: bool) -> dict[str, float]:
    """Options of the group of a parameter that is SGD's beside Muon.

    Args:
        optimizer: its options.
        name: of the parameter.
        weights: of the network's layers, in its order.
        decays: whether the weight decay is for this one.
    """
    rate = optimizer.head_lr if name in weights else optimizer.bias_lr
    options = {"lr": rate}
    if decays and rate:
        options["weight_decay"] = optimizer.weight_decay / rate
    if weights and name == first_bias(weights) and optimizer.first_bias_share < 1:
        options["schedule_share"] = optimizer.first_bias_share
    return options


def first_bias(weights: Sequence[str]) -> str:
    """Name of the first layer's bias, if it has one."""
    return weights[0].removesuffix("weight") + "bias"


def _dimensions(parameter: Any) -> int:
    """The number of dimensions of the whole parameter: ZeRO-3 leaves an empty one and notes its shape."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
