"""The model's weights in a checkpoint of any strategy."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from cifar_zero.checkpoints.finetuning.lora import merged
from cifar_zero.checkpoints.read import RECORD
from cifar_zero.checkpoints.zero_folder import AVERAGE
from cifar_zero.core.errors import UsageError

PREFIX = "net."
"""Prefix of the model's names in the LightningModule."""


def network(checkpoint: Mapping[str, Any], averaged: bool = True) -> dict[str, Tensor]:
    """Returns the weights by the model's own names.

    Args:
        checkpoint: as `read.read` returns it.
        averaged: whether the averaged weights are used, if there are any.
    """
    average = checkpoint[AVERAGE]["weights"] if averaged and AVERAGE in checkpoint else {}
    state = checkpoint["state_dict"]
    return {key.removeprefix(PREFIX): average.get(key, value) for key, value in state.items() if key.startswith(PREFIX)}


def plain_network(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the same with adapters merged: the weights of a plain model of models/."""
    lora = checkpoint.get(RECORD, {}).get("config", {}).get("lora", {})
    return merged(network(checkpoint), lora.get("alpha", 0.0))


def check_fits(net: nn.Module, weights: Mapping[str, Tensor], checkpoint: str) -> None:
    """Compares names and shapes.

    Raises:
        UsageError: weights are missing, unknown, or of another shape than the model's.
    """
    wanted = net.state_dict()
    differing = [
        *(f"{key} is missing" for key in wanted if key not in weights),
        *(f"{key} is unknown" for key in weights if key not in wanted),
        *(
            f"{key} is {tuple(weights[key].shape)}, not {tuple(wanted[key].shape)}"
            for key in wanted
            if key in weights and weights[key].shape != wanted[key].shape
        ),
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise UsageError(f"{checkpoint} is of another model: {', '.join(differing[:3])}{more}")
