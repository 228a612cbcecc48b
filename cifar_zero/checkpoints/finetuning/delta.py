"""Deltas: safetensors files with only what a run has trained, which need the weights that the run started from."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cifar_zero.checkpoints.finetuning.load import BASE, read_plain
from cifar_zero.checkpoints.finetuning.network import on_meta, trained_names
from cifar_zero.checkpoints.read import PREFIX, RECORD, network
from cifar_zero.checkpoints.safetensors_file import metadata_of, read_safetensors, write_safetensors
from cifar_zero.config.flags import config_of
from cifar_zero.core.errors import UsageError

DTYPES, RECIPE = "base_dtypes", "recipe"
"""Further keys of the metadata, both JSON objects: the dtype of each frozen tensor in the run (DeepSpeed's mixed
precision rounds it), and the run's configuration. BASE is the checksum of the frozen tensors."""


def write(checkpoint: Mapping[str, Any], output: Path, name: str) -> list[str]:
    """Writes a delta of a checkpoint and returns the names of its weights.

    Raises:
        UsageError: the run froze nothing, or the checkpoint is not of train.py.
        OSError: it cannot be written.
    """
    metadata = metadata_of(checkpoint, name)
    record = checkpoint[RECORD]
    try:
        config = config_of(record["config"])
    except TypeError as error:
        raise UsageError(f"{name} was written by another version of train.py: {error}") from error
    trained = trained_names(on_meta(config.model, len(record["classes"]), config.trainable, config.lora))
    weights = network(checkpoint)
    base = {key: value for key, value in weights.items() if key not in trained}
    if not base:
        raise UsageError(f"--to delta: the run of {name} trained all of its weights, use --to safetensors")
    metadata |= {
        BASE: checksum(base),
        DTYPES: json.dumps({key: str(value.dtype).removeprefix("torch.") for key, value in base.items()}),
        RECIPE: json.dumps(record["config"]),
    }
    own = {key: value for key, value in weights.items() if key in trained}
    write_safetensors(own, output, metadata)
    return [*own]


def together(base: Path, delta: Path, trust: bool = False) -> dict[str, Any]:
    """Returns the checkpoint of a delta, bit for bit, as `read.read` would, without what is needed to resume.

    The base is what the run started from; see `load.read_plain`.

    Raises:
        UsageError: one of them is damaged, or they do not belong together.
    """
    trained, metadata = read_safetensors(delta)
    if BASE not in metadata:
        raise UsageError(f"--delta {delta} was not written by export.py --to delta")
    dtypes = json.loads(metadata[DTYPES])
    weights = read_plain(base, trust)
    missing = [name for name in dtypes if name not in weights]
    if missing:
        raise UsageError(f"--delta {delta} has another base than {base}, which has no {missing[0]}")
    frozen = {name: weights[name].to(getattr(torch, dtype)) for name, dtype in dtypes.items()}
    if checksum(frozen) != metadata[BASE]:
        raise UsageError(f"--delta {delta} has another base than {base}: the checksums of their weights differ")
    return {
        "state_dict": {PREFIX + name: value for name, value in {**frozen, **trained}.items()},
        "global_step": int(metadata["step"]),
        RECORD: {"config": json.loads(metadata[RECIPE]), "classes": json.loads(metadata["classes"])},
    }


def checksum(weights: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and values, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
