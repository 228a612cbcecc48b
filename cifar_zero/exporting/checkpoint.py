"""Reading a network out of a checkpoint of any strategy, without its run folder and without Lightning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar_zero.checkpoints import weights
from cifar_zero.checkpoints.read import RECORD, read
from cifar_zero.checkpoints.safetensors_file import metadata_of
from cifar_zero.exporting import network
from cifar_zero.exporting.classifier import Classifier, of_network


def load(file: Path, known: Mapping[str, str] | None = None, trust: bool = False) -> Classifier:
    """See `exporting.load`."""
    return of_content(read(file, trust), file, known)


def of_content(content: Mapping[str, Any], file: Path, known: Mapping[str, str] | None = None) -> Classifier:
    """The same of a checkpoint that was read."""
    metadata = metadata_of(content, file.name) if RECORD in content else {}
    return of_network(*network.build(weights.plain_network(content), metadata, file, known))
