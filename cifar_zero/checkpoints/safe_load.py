"""Reading a file of torch.save that may be damaged, or made by somebody who wants to run code here."""

from __future__ import annotations

import importlib
import textwrap
from pathlib import Path
from typing import Any

import torch

from cifar_zero.checkpoints.records import check_records
from cifar_zero.core.errors import UsageError

HARMLESS = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
"""What DeepSpeed (0.19.8) puts into its checkpoints beside tensors and plain Python: classes that hold data."""


def load(file: Path, trust: bool = False, verify: bool = True, device: str = "cpu") -> Any:
    """The content of a file written by torch.save.

    Args:
        file: to read.
        trust: whether a file that holds more than tensors and plain Python, and so can run code, is loaded too.
        verify: whether the checksum of each record is compared first: torch itself does not look at them.
        device: of the tensors, cpu or meta. On meta they have shapes and no values, and the file's are not read.

    Raises:
        UsageError: it is damaged, no checkpoint, or would need `trust`.
    """
    check_records(file, verify)
    names = _globals(file)
    unknown = sorted(set(names) - {f"{module}.{name}" for module, name in HARMLESS})
    if unknown and not trust:
        raise UsageError(
            f"{file} wants to load {', '.join(unknown[:3])}, which could run any code: "
            "--trust does it, where you know who wrote the file"
        )
    try:
        if trust:
            return torch.load(file, map_location=device, mmap=device == "meta", weights_only=False)
        harmless = [
            getattr(importlib.import_module(module), name) for module, name in HARMLESS if f"{module}.{name}" in names
        ]
        with torch.serialization.safe_globals(harmless):
            return torch.load(file, map_location=device, mmap=device == "meta", weights_only=True)
    except Exception as error:  # torch, pickle and zipfile each have errors of their own for a damaged file
        raise UsageError(f"{file} cannot be read, it is damaged or no checkpoint: {_shortened(error)}") from error


def _globals(file: Path) -> list[str]:
    """Names of the functions and classes, beyond torch's harmless ones, that the file would import."""
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception as error:  # a pickle that is none
        raise UsageError(f"{file} cannot be read, it is damaged or no checkpoint: {_shortened(error)}") from error


def _shortened(error: Exception) -> str:
    return textwrap.shorten(str(error), 120, placeholder=" ...")
