"""Export as a dict of plain tensors, for torch.load(weights_only=True) and load_state_dict; it says nothing else."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor, nn

from cifar_zero.checkpoints.safe_load import load as safe_load
from cifar_zero.core.errors import UsageError
from cifar_zero.exporting import network
from cifar_zero.exporting.classifier import Classifier, of_network


def encode(net: nn.Module, metadata: dict[str, str]) -> bytes:
    """See `exporting.Exporter`; there is no place for the metadata."""
    stream = BytesIO()
    torch.save(dict(net.state_dict()), stream)
    return stream.getvalue()


def load(file: Path, known: Mapping[str, str] | None = None, trust: bool = False) -> Classifier:
    """See `exporting.Exporter`; `known` is always needed."""
    weights = safe_load(file, trust)
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UsageError(f"{file} is no dict of plain tensors; a checkpoint's name ends in .ckpt")
    return of_network(*network.build(weights, {}, file, known))
