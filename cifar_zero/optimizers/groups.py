"""The parameter groups of an optimizer: which parameters decay, are Muon's, or have their own learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers.muon import Muon, MuonSGD
from cifar_zero.optimizers.options import OptimizerOptions


def parameter_groups(optimizer: OptimizerOptions, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the groups for an optimizer, in the model's order, those with a learning rate of their own last.

    If there are several, each has `param_names`, as torch's optimizers call them (2.6 and later): a checkpoint then
    says which numbers belong to which parameter.

    Args:
        optimizer: its options.
        parameters: of the model, by name and in its order; sharded ones too. Frozen ones are in no group.
    """
    dimensions = {name: _dimensions(parameter) for name, parameter in parameters.items()}
    weights = _layer_weights(dimensions)
    by_muon: set[str] = set()
    first_bias = ""
    if isinstance(optimizer, Muon):
        by_muon = hidden_matrices(dimensions)
    if isinstance(optimizer, MuonSGD):
        by_muon = {*weights[:-1]}
        first_bias = weights[0].removesuffix("weight") + "bias" if weights else ""
        if optimizer.first_bias_share < 1 and first_bias not in dimensions:
            raise UsageError("--optimizer.first_bias_share: the model's first layer has no bias, leave it out")
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        decays = optimizer.weight_decay > 0 and (optimizer.weight_decay_on == "all" or dimensions[name] >= 2)
        options: dict[str, Any] = {"muon": True} if name in by_muon else {}
        if isinstance(optimizer, MuonSGD) and name not in by_muon:
            options["lr"] = rate = optimizer.head_lr if name in weights else optimizer.bias_lr
            if decays and rate:
                options["weight_decay"] = optimizer.weight_decay / rate
            if name == first_bias and optimizer.first_bias_share < 1:
                options["schedule_share"] = optimizer.first_bias_share
        elif optimizer.weight_decay and not decays:
            options["weight_decay"] = 0.0
        group = groups.setdefault((*options.items(),), {**options, "params": [], "param_names": []})
        group["params"].append(parameter)
        group["param_names"].append(name)
    if len(groups) == 1:
        next(iter(groups.values())).pop("param_names")
    # The plots show the learning rate of the first group: --optimizer.lr.
    return sorted(groups.values(), key=lambda group: "lr" in group)


def hidden_matrices(dimensions: Mapping[str, int]) -> set[str]:
    """Returns the weights of linear and convolution layers, without those of the first and of the last layer.

    Muon suits neither the layer that takes the images nor the one that gives the scores, nor embeddings, whose rows are
    independent (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    Args:
        dimensions: of all parameters, by name and in the model's order.
    """
    return {*_layer_weights(dimensions)[1:-1]}


def _layer_weights(dimensions: Mapping[str, int]) -> list[str]:
    return [name for name, number in dimensions.items() if number in (2, 4) and name.endswith("weight")]


def _dimensions(parameter: Any) -> int:
    """The number of dimensions of the whole parameter: ZeRO-3 leaves an empty one and notes its shape."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
