"""Exports as safetensors: weights and metadata in a file that runs no code and is memory-mapped."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from cifar_zero.checkpoints import safetensors_file
from cifar_zero.exporting.classifier import Classifier, build, of_model


def encode(net: nn.Module, metadata: dict[str, str]) -> bytes:
    """See `exporting.Format.module`."""
    return safetensors_file.encode(net.state_dict(), metadata)


def load(file: Path, known: Mapping[str, str] | None = None, trust: bool = False) -> Classifier:
    """See `exporting.Format.module`; `trust` is never needed."""
    return of_model(*build(*safetensors_file.read_safetensors(file), file, known))
