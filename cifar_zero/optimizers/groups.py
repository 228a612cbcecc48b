"""Divides a model's parameters into the parameter groups of an optimizer, by weight decay, Muon and separate learning
rates. Also adapts a checkpoint's optimizer state, which may have other groups, to these groups."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cifar_zero.optimizers import Muon, MuonSGD, OptimizerOptions


def parameter_groups(
    optimizer: OptimizerOptions, parameters: Mapping[str, Any], shape: Callable[[Any], Sequence[int]] = Tensor.size
) -> list[dict[str, Any]]:
    """Returns the parameter groups for an optimizer, in the model's order, except that groups with a separate learning
    rate come last. Frozen parameters are in no group. Each group lists the names of its parameters as `param_names`, a
    key of torch's optimizers, so that a checkpoint records which index belongs to which parameter. `shape` returns the
    unsharded shape of a parameter."""
    dimensions = {name: len(shape(each)) for name, each in parameters.items()}
    # The weights of linear and convolution layers, in the model's order.
    weights = [name for name, number in dimensions.items() if number in (2, 4) and name.endswith("weight")]
    by_muon: list[str] = []
    if isinstance(optimizer, Muon):
        # Muon suits neither the layer that takes the images nor the one that gives the scores, nor embeddings, whose
        # rows are independent (Jordan et al. 2024, kellerjordan.github.io/posts/muon).
        by_muon = weights[1:-1]
    elif isinstance(optimizer, MuonSGD):
        by_muon = weights[:-1]
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        decays = optimizer.weight_decay > 0 and (optimizer.weight_decay_on == "all" or dimensions[name] >= 2)
        options: dict[str, Any] = {}
        if name in by_muon:
            options["muon"] = True
        if isinstance(optimizer, MuonSGD) and name not in by_muon:
            rate = optimizer.bias_lr
            if name in weights:
                rate = optimizer.head_lr
            options["lr"] = rate
            if decays and rate:
                options["weight_decay"] = optimizer.weight_decay / rate
        elif optimizer.weight_decay and not decays:
            options["weight_decay"] = 0.0
        group = groups.setdefault((*options.items(),), {**options, "params": [], "param_names": []})
        group["params"].append(parameter)
        group["param_names"].append(name)
    # The plots show the learning rate of the first group, which is to be --optimizer.lr.
    return sorted(groups.values(), key=lambda group: "lr" in group)


def keep_own_options(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a saved optimizer state, which may come from another implementation, device or grouping, adapted to the
    groups and options of the optimizer that will load it. Only the learning rates (`lr` and `initial_lr`), which a
    schedule has changed, stay as saved. If a group has no `param_names`, the saved groups are assumed to match the
    optimizer's groups in order and content."""
    own_groups = optimizer.param_groups
    expected_names: list[Any] = [group.get("param_names") for group in own_groups]
    saved_names = [group.get("param_names") for group in state["param_groups"]]
    if (
        None not in (*expected_names, *saved_names) and saved_names != expected_names
    ):  # groups without names may hold ZeRO's flat parameters
        state = _regrouped(state, expected_names)
    groups: list[dict[str, Any]] = []
    for own, saved in zip(own_groups, state["param_groups"], strict=True):
        groups.append({**own, **{key: saved[key] for key in ("lr", "initial_lr", "params") if key in saved}})
    return {**state, "param_groups": groups}


def match_strides(optimizer: Optimizer) -> None:
    """Gives each tensor in an optimizer's loaded state that has the shape of its parameter the parameter's strides, as
    in a new optimizer. torch's fused updates read parameter and state in memory order."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if getattr(value, "shape", None) == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def by_name(state: dict[str, Any]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the group and the state of each parameter in a checkpoint's optimizer state, keyed by parameter name. A
    parameter that was never updated has an empty state."""
    entries: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for group in state["param_groups"]:
        for name, number in zip(group["param_names"], group["params"], strict=True):
            entries[name] = group, state["state"].get(number, {})
    return entries


def _regrouped(state: dict[str, Any], new_names: list[list[str]]) -> dict[str, Any]:
    """Returns a saved optimizer state with its parameters divided into the groups that `new_names` lists. A group has
    the options that its first parameter's group had."""
    saved = by_name(state)
    groups: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    for names in new_names:
        group, _ = saved[names[0]]
        groups.append({**group, "params": [*range(len(entries), len(entries) + len(names))]})
        entries += [saved[name][1] for name in names]
    return {**state, "state": {number: entry for number, entry in enumerate(entries) if entry}, "param_groups": groups}
