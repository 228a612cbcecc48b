"""Exports as a dict of plain tensors, for torch.load(weights_only=True) and load_state_dict, without metadata."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor, nn

from cifar_zero.checkpoints.safe_load import load as safe_load
from cifar_zero.core.errors import UsageError
from cifar_zero.exporting.classifier import Classifier, build, of_model


def encode(net: nn.Module, metadata: dict[str, str]) -> bytes:
    """See `exporting.Format.module`; the metadata is left out."""
    stream = BytesIO()
    torch.save(dict(net.state_dict()), stream)
    return stream.getvalue()


def load(file: Path, known: Mapping[str, str] | None = None, trust: bool = False) -> Classifier:
    """See `exporting.Format.module`; `known` is always needed."""
    weights = safe_load(file, trust)
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UsageError(f"{file} is not a dict of plain tensors; the name of a checkpoint ends in .ckpt")
    return of_model(*build(weights, {}, file, known))
