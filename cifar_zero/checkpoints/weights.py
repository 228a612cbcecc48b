"""The network's weights out of a checkpoint of any strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cifar_zero.checkpoints.finetuning.lora import merged
from cifar_zero.checkpoints.read import RECORD, read
from cifar_zero.checkpoints.zero_folder import AVERAGE
from cifar_zero.core.errors import UsageError

PREFIX = "net."
"""Where the network lies in the LightningModule."""


def network(checkpoint: Mapping[str, Any], averaged: bool = True) -> dict[str, Tensor]:
    """The weights in a checkpoint that was read, by the network's own names.

    Args:
        checkpoint: as `read.read` returns it.
        averaged: whether the average of the weights is taken, where there is one, and not the newest.
    """
    average = checkpoint[AVERAGE]["weights"] if averaged and AVERAGE in checkpoint else {}
    state = checkpoint["state_dict"]
    return {key.removeprefix(PREFIX): average.get(key, value) for key, value in state.items() if key.startswith(PREFIX)}


def plain_network(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights in a checkpoint that was read, with adapters merged: of a network of models/ as it stands there."""
    lora = checkpoint.get(RECORD, {}).get("config", {}).get("lora", {})
    return merged(network(checkpoint), lora.get("alpha", 0.0))


def load_weights(net: nn.Module, checkpoint: Path, trust: bool = False, averaged: bool = True) -> None:
    """Puts a checkpoint's weights into a network, whose dtype stays.

    Raises:
        UsageError: as `read_weights` does.
    """
    net.load_state_dict(read_weights(net, checkpoint, trust, averaged))


def read_weights(net: nn.Module, checkpoint: Path, trust: bool = False, averaged: bool = True) -> dict[str, Tensor]:
    """The weights in a checkpoint, by the network's own names.

    Args:
        net: of the kind that the checkpoint was written for; one on torch's meta device will do.
        checkpoint: Lightning's file, or the folder that DeepSpeed writes, sharded or not.
        trust: see `safe_load.load`.
        averaged: see `network`.

    Raises:
        UsageError: the checkpoint is damaged or of another network.
    """
    found = network(read(checkpoint, trust), averaged)
    check_fits(net, found, str(checkpoint))
    return found


def check_fits(net: nn.Module, weights: Mapping[str, Tensor], checkpoint: str) -> None:
    """Compares names and shapes.

    Raises:
        UsageError: weights are missing, unknown, or of another shape than the network's.
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
        raise UsageError(f"{checkpoint} is of another network: {', '.join(differing[:3])}{more}")
