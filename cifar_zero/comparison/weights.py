"""Reads the weights of runs after the last step, and compares those of two runs."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from cifar_zero.checkpoints.read import network, read
from cifar_zero.comparison.agreement import Apart
from cifar_zero.comparison.reading import last_checkpoint
from cifar_zero.comparison.result import Run
from cifar_zero.core.errors import UsageError

Weights = Mapping[str, Tensor]
"""Tensors by the names of the plain model's state_dict, including buffers."""


def of_run(run: Run, trust: bool = False) -> Weights:
    """Returns the weights in a run's last checkpoint; not the average of --ema.

    Raises:
        UsageError: there is no checkpoint, or it cannot be read.
    """
    checkpoint = last_checkpoint(run)
    if not checkpoint.exists():
        raise UsageError(f"{run.folder} has no checkpoint of its last step")
    return network(read(checkpoint, trust), averaged=False)


def apart(reference: Weights, other: Weights) -> dict[str, Apart]:
    """Compares two runs tensor by tensor; integers (batch norm's count of batches) are left out."""
    names = [name for name in {**reference, **other} if _is_weight(reference.get(name)) or _is_weight(other.get(name))]
    return {name: _apart(reference.get(name), other.get(name)) for name in names}


def convolves(weights: Weights) -> bool:
    """Whether a model has convolutions, whose weights are of shape (out, in, height, width)."""
    return any(value.dim() == 4 for value in weights.values())


def normalises(weights: Weights) -> bool:
    """Whether a model has batch normalisations."""
    return any(name.endswith("running_mean") for name in weights)


def _is_weight(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point()


def _apart(one: Tensor | None, other: Tensor | None) -> Apart:
    """Returns the difference; infinite if a run lacks the tensor, if the shapes differ, or if only one has a number."""
    largest = 0.0 if one is None or not one.numel() else float(one.abs().max())
    if one is None or other is None or one.shape != other.shape:
        return Apart(math.inf, largest)
    if not one.numel():
        return Apart(0.0, largest)
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    difference = float(torch.where(same, 0.0, (one - other).abs()).max())
    return Apart(math.inf if math.isnan(difference) else difference, largest)
