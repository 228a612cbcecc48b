"""The parameter groups of an optimizer: who decays, and who is Muon's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimizers.muon import Muon


def parameter_groups(optimizer: Any, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups that an optimizer is made for, in the order in which the network comes to them.

    Where there are several, each has `param_names`, as torch's optimizers call them (2.6 and later): a checkpoint then
    says which numbers are whose.

    Args:
        optimizer: its options, a dataclass of the registry.
        parameters: of the network, by name and in its order; sharded ones too. Frozen ones are in no group.
    """
    dimensions = {name: _dimensions(parameter) for name, parameter in parameters.items()}
    decays_some = optimizer.weight_decay > 0 and optimizer.weight_decay_on == "matrices"
    hidden = hidden_matrices(dimensions) if isinstance(optimizer, Muon) else set()
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        options: dict[str, Any] = {}
        if decays_some and dimensions[name] < 2:
            options["weight_decay"] = 0.0
        if name in hidden:
            options["muon"] = True
        group = groups.setdefault((*options.items(),), {**options, "params": [], "param_names": []})
        group["params"].append(parameter)
        group["param_names"].append(name)
    if len(groups) == 1:
        next(iter(groups.values())).pop("param_names")
    return [*groups.values()]


def hidden_matrices(dimensions: Mapping[str, int]) -> set[str]:
    """The weights of linear and convolution layers between the first one and the last one of a network.

    Muon is not for what takes in the images or gives out the classes, nor for embeddings, whose rows are apart (Jordan
    et al. 2024, kellerjordan.github.io/posts/muon).

    Args:
        dimensions: of all parameters, by name and in the network's order.
    """
    weights = [name for name, number in dimensions.items() if number in (2, 4) and name.endswith("weight")]
    return {*weights[1:-1]}


def _dimensions(parameter: Any) -> int:
    """Of the whole parameter: ZeRO-3 leaves an empty one and notes its shape, and so does strategies/fsdp.py."""
    return len(getattr(parameter, "ds_shape", getattr(parameter, "whole_shape", parameter.shape)))
