"""Reads files of torch.save that may be damaged, or made to run code. Imports torch only to load."""

import pkgutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

from cifar_zero.core.errors import UsageError, short

HARMLESS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes that only hold data, which DeepSpeed (0.19.8) puts into its checkpoints."""


def load(file: Path, trust: bool = False, verify: bool = True, device: str = "cpu", mapped: bool = False) -> Any:
    """Returns the content of a file written by torch.save.

    With `trust` a file that holds more than tensors and plain Python, and so can run code, is loaded too; with `verify`
    the checksum of each record is compared first, which torch does not do. On the device meta the tensors have shapes
    but no values, and the values are not read; `mapped` ones are read when they are used. Raises UsageError: the file
    is damaged, no checkpoint, or would need `trust`.
    """
    import torch

    check_records(file, verify)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        unknown = sorted(set(names).difference(HARMLESS))
        if unknown and not trust:
            wanted = ", ".join(unknown[:3])
            raise UsageError(f"{file} loads {wanted}, which could run any code: add --trust if you know who wrote it")
        with torch.serialization.safe_globals([pkgutil.resolve_name(name) for name in HARMLESS if name in names]):
            return torch.load(file, map_location=device, mmap=mapped or device == "meta", weights_only=not trust)
    except UsageError:
        raise
    except Exception as error:  # torch, pickle and zipfile each have their own errors for a damaged file
        raise UsageError(f"{file} cannot be read, it is damaged or no checkpoint: {short(error)}") from error


def check_records(file: Path, checksums: bool = True) -> None:
    """Compares every record of a file of torch.save with its checksum; without `checksums` only reads their list at the
    file's end, which a truncated file lacks. Raises UsageError: they differ, or it is no such file."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip() if checksums else None
            named = any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
        raise UsageError(f"{file} is damaged or no checkpoint: {error}") from error
    if damaged is not None:
        raise UsageError(f"{file} is damaged: its part {damaged} differs from its checksum")
    if not named:
        raise UsageError(f"{file} is no checkpoint")
