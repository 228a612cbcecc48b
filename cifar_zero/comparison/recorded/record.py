"""What a recorded training did at each optimizer step, and its file."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cifar_zero.core import atomic

Tensors = dict[str, Tensor]
"""Tensors by the names of the plain model, on the CPU; float32 but for weights of another type."""


@dataclass
class Record:
    """A training of some steps; each list has an entry per optimizer step."""

    losses: list[float] = field(default_factory=list)
    """Mean over the micro-batches and the ranks."""
    rates: list[list[float]] = field(default_factory=list)
    """Learning rate of each parameter group."""
    gradients: list[Tensors] = field(default_factory=list)
    """Of the whole batch, before clipping, of the first steps; zeros where a parameter has none."""
    weights: list[Tensors] = field(default_factory=list)
    """At the start and after each of the first steps, frozen ones too."""


def record_file(folder: Path, number: int) -> Path:
    """Returns the path of the record of a training."""
    return folder / f"{number}.pt"


def save(record: Record, file: Path) -> None:
    """Writes a record; the file appears when it is whole."""
    torch.save(vars(record), atomic.staged(file))
    atomic.staged(file).replace(file)


def load(file: Path) -> Record:
    """Reads a record."""
    return Record(**torch.load(file, weights_only=True))
