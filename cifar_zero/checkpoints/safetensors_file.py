"""A model's weights as one safetensors file, whose metadata says how to build the model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cifar_zero.checkpoints.read import RECORD
from cifar_zero.config.settings import DataConfig
from cifar_zero.core import atomic
from cifar_zero.core.errors import UsageError


def metadata_of(checkpoint: Mapping[str, Any], name: str, dtype: str = "float32") -> dict[str, str]:
    """Returns what a checkpoint says of its model as strings, the only values that safetensors allows.

    `model`, `options` (JSON object) and `classes` (JSON list) build the model; `image_size` is the side of its images
    in pixels, `mean` and `std` normalise them, for pixels from 0 to 1, as numbers for red, green and blue; `dtype`;
    `checkpoint` and `step` are the origin of the weights. `format` is what transformers and others require in a
    safetensors file of torch. Raises UsageError: the checkpoint was not written by cifar-zero train.
    """
    if RECORD not in checkpoint:
        raise UsageError(f"{name} does not say which model it is of: it was not written by cifar-zero train")
    record = checkpoint[RECORD]
    side, mean, std = DataConfig(**record["config"]["data"]).inputs
    return {
        "format": "pt",
        "model": record["config"]["model"]["name"],
        "options": json.dumps(record["config"]["model"]["options"]),
        "classes": json.dumps(record["classes"]),
        "image_size": str(side),
        "mean": ",".join(map(str, mean)),
        "std": ",".join(map(str, std)),
        "dtype": dtype,
        "checkpoint": name,
        "step": str(checkpoint["global_step"]),
    }


def encode(weights: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Returns the content of a safetensors file. Weights that share memory are written once for each name."""
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    return safetensors.torch.save(plain, metadata)


def write_safetensors(weights: Mapping[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Writes a safetensors file atomically. Raises OSError if it cannot be written."""
    new = atomic.staged(file)
    try:
        new.write_bytes(encode(weights, metadata))
        atomic.put_in_place(file)
    finally:
        atomic.discard(new)


def read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns weights, on the CPU, and metadata, which may be empty. Raises UsageError: the file is damaged."""
    try:
        with safe_open(file, "pt") as content:
            return {name: content.get_tensor(name) for name in content.keys()}, content.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file} cannot be read, it is damaged or no safetensors file: {error}") from error
