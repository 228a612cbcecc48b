"""The parameter groups of an optimizer: which parameters decay, are Muon's, or have their own learning rate; and how
the state of other groups, those of a checkpoint, fits them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from cifar_zero.optimizers import Muon, MuonSGD, OptimizerOptions


def parameter_groups(
    optimizer: OptimizerOptions, parameters: Mapping[str, Any], shape: Callable[[Any], Sequence[int]] = Tensor.size
) -> list[dict[str, Any]]:
    """Returns the groups for an optimizer, in the model's order, those with a learning rate of their own last. Each has
    `param_names`, as torch's optimizers call them: a checkpoint then says which numbers belong to which parameter.
    `parameters` are the model's, by name and in its order; frozen ones are in no group. `shape` returns the shape of a
    parameter, which the strategy may have sharded."""
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
    # The plots show the learning rate of the first group: --optimizer.lr.
    return sorted(groups.values(), key=lambda group: "lr" in group)


def keep_own_options(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of another implementation, device or grouping with this optimizer's options and groups. Only
    the learning rate, which a schedule has moved, is the checkpoint's. Groups without `param_names` are the same."""
    own_groups = optimizer.param_groups
    wanted: list[Any] = [group.get("param_names") for group in own_groups]
    found = [group.get("param_names") for group in state["param_groups"]]
    if None not in (*wanted, *found) and found != wanted:  # else they may be ZeRO's flat ones
        state = _regrouped(state, wanted)
    groups: list[dict[str, Any]] = []
    for own, saved in zip(own_groups, state["param_groups"], strict=True):
        groups.append({**own, **{key: saved[key] for key in ("lr", "initial_lr", "params") if key in saved}})
    return {**state, "param_groups": groups}


def lay_like_parameters(optimizer: Optimizer) -> None:
    """Gives a loaded state the strides of its parameters: torch's fused updates walk through both in memory order."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if getattr(value, "shape", None) == parameter.shape and value.stride() != parameter.stride():
                state[key] = value.new_empty(value.shape).as_strided(value.shape, parameter.stride()).copy_(value)


def by_name(state: dict[str, Any]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Returns for each parameter its group in a checkpoint's optimizer, and its state, empty before the first step."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for group in state["param_groups"]:
        for name, number in zip(group["param_names"], group["params"], strict=True):
            found[name] = group, state["state"].get(number, {})
    return found


def _regrouped(state: dict[str, Any], wanted: list[list[str]]) -> dict[str, Any]:
    """Returns the state with the groups of these names."""
    saved = by_name(state)
    groups: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    for names in wanted:
        group, _ = saved[names[0]]
        groups.append({**group, "params": [*range(len(entries), len(entries) + len(names))]})
        entries += [saved[name][1] for name in names]
    return {**state, "state": {number: entry for number, entry in enumerate(entries) if entry}, "param_groups": groups}
