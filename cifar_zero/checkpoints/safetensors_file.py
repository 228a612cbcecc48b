"""A network's weights as one safetensors file, with what is needed to build the network again beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cifar_zero.checkpoints.read import RECORD
from cifar_zero.core import atomic
from cifar_zero.core.errors import UsageError
from cifar_zero.data.augment import MEAN, STD


def metadata_of(checkpoint: Mapping[str, Any], name: str, dtype: str = "float32") -> dict[str, str]:
    """What a checkpoint says of its network, as texts, for safetensors knows no other values.

    Args:
        checkpoint: as `read.read` returns it.
        name: of the checkpoint's file or folder.
        dtype: of the weights that are written.

    Returns:
        `model`, `options` (JSON object) and `classes` (JSON list) build the network; `mean` and `std` are those of
        the images, for pixels from 0 to 1, the same in each channel; `dtype`; `checkpoint` and `step` tell where the
        weights come from. `format` is what transformers and others ask for in a safetensors file of torch.

    Raises:
        UsageError: the checkpoint was not written by train.py.
    """
    if RECORD not in checkpoint:
        raise UsageError(f"{name} does not say which network it is of: it was not written by train.py")
    record = checkpoint[RECORD]
    return {
        "format": "pt",
        "model": record["config"]["model"]["name"],
        "options": json.dumps(record["config"]["model"]["options"]),
        "classes": json.dumps(record["classes"]),
        "mean": str(MEAN),
        "std": str(STD),
        "dtype": dtype,
        "checkpoint": name,
        "step": str(checkpoint["global_step"]),
    }


def encode(weights: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    """The content of a safetensors file. Weights that share memory are written once for each of their names."""
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    return safetensors.torch.save(plain, metadata)


def write_safetensors(weights: Mapping[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Writes a safetensors file; under its name there is the whole of it, or what was there before.

    Raises:
        OSError: it cannot be written.
    """
    new = atomic.staged(file)
    try:
        new.write_bytes(encode(weights, metadata))
        atomic.put_in_place(file)
    finally:
        atomic.discard(new)


def read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights, on the CPU, and metadata, empty where the file has none.

    Raises:
        UsageError: it is damaged or no safetensors file.
    """
    try:
        with safe_open(file, "pt") as content:
            return {name: content.get_tensor(name) for name in content.keys()}, content.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file} cannot be read, it is damaged or no safetensors file: {error}") from error
