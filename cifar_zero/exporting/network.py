"""From plain weights to the network: every name and shape is compared with the model's own."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cifar_zero import models
from cifar_zero.core.errors import UsageError


def build(
    weights: Mapping[str, Tensor], metadata: Mapping[str, str], file: Path, known: Mapping[str, str] | None = None
) -> tuple[nn.Module, tuple[str, ...]]:
    """The network with these weights in float32, in evaluation mode, and the names of its classes.

    Args:
        weights: by the network's own names, in any floating-point format.
        metadata: as of `checkpointing.safetensors_file.metadata_of`; empty where the file has none.
        file: that they come from, for messages.
        known: the same, of a file that has none: `model` at least. Without `options` they are the defaults, without
            `classes` these are numbered.

    Raises:
        UsageError: they are of another network, or it is not said of which, or said twice.
    """
    if "model" in metadata and known:
        raise UsageError(f"{file} says itself that it is of the network {metadata['model']}: leave --model out")
    about = metadata if "model" in metadata else known
    if not about:
        raise UsageError(f"{file} does not say which network it is of: add --model NAME ({', '.join(models.MODELS)})")
    try:
        options = json.loads(about.get("options", "{}"))
        classes = json.loads(about["classes"]) if "classes" in about else _numbers(about["model"], options, weights)
        net = models.build(about["model"], len(classes), **options)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{file} is of a network that is not known here: {about['model']} ({error})") from error
    try:
        net.load_state_dict(dict(weights))
    except RuntimeError as error:
        listed = str(error).partition(":")[2]  # torch (2.15) names the class first, then what differs
        differing = textwrap.shorten(listed, 160, placeholder=" ...")
        hint = "" if "options" in about else " (--model has its default options; a safetensors file keeps the run's)"
        raise UsageError(f"{file} is of another network: {differing}{hint}") from error
    return net.eval(), tuple(classes)


def _numbers(name: str, options: dict[str, Any], weights: Mapping[str, Tensor]) -> list[str]:
    """As many as is long, in the weights, what is 2 long in a network for two classes and 3 in one for three."""
    with torch.device("meta"):
        two, three = (models.build(name, classes, **options).state_dict() for classes in (2, 3))
    for key, value in two.items():
        for axis, (size, other) in enumerate(zip(value.shape, three[key].shape, strict=True)):
            if size != other and key in weights and weights[key].dim() == value.dim():
                return [*map(str, range(weights[key].shape[axis]))]
    return ["0"]  # of another network, as the comparison of the names will say
