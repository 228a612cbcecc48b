"""Reads files of torch.save that may be damaged or crafted to run code. Imports torch only when a file is loaded."""

import pkgutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

from cifar_zero.core.errors import UsageError, short

STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"

HARMLESS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    STAGE,
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes that DeepSpeed (0.19.8) puts into its checkpoints and that only hold data."""


def load_safely(file: Path, trust: bool = False, verify: bool = True, device: str = "cpu") -> Any:
    """Returns the content of a file written by torch.save. Raises UsageError if the file is missing or damaged, is not
    a checkpoint, or would need `trust`.

    Args:
        trust: Whether to load more than tensors, plain Python objects and HARMLESS, which can run code.
        verify: Whether to compare the checksum of each record first, which torch does not do.
        device: Device of the tensors. On `meta` they have shapes but no values, and the values are not read.
    """
    import torch

    check_records(file, verify)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        unknown = sorted(set(names).difference(HARMLESS, ["builtins.getattr"] if STAGE in names else []))
        if unknown and not trust:
            classes = ", ".join(unknown[:3])
            raise UsageError(f"{file} loads {classes}, which could run any code: add --trust if you know who wrote it")
        allowed = [pkgutil.resolve_name(name) for name in HARMLESS if name in names]
        with torch.serialization.safe_globals([*allowed, (_stage, "builtins.getattr")]):
            return torch.load(file, map_location=device, mmap=device == "meta", weights_only=not trust)
    except UsageError:
        raise
    except Exception as error:  # torch, pickle and zipfile each raise other errors for a damaged file
        raise UsageError(f"{file} cannot be read, because it is damaged or not a checkpoint: {short(error)}") from error


def _stage(enum: Any, name: str) -> Any:
    """Returns the ZeRO stage called `name`. Raises UsageError if `enum` is not the enum of the stages. It replaces
    getattr, which can reach all code. Python 3.11.2 pickles a member of an enum as a call of getattr, and Python 3.11.7
    as its value."""
    if enum is not pkgutil.resolve_name(STAGE):
        raise UsageError(f"the checkpoint reads {name} of {enum}, which could run any code")
    return enum[name]


def check_records(file: Path, checksums: bool) -> None:
    """Compares every record of a file of torch.save with its checksum. Without `checksums`, only reads the list of
    records at the file's end, which a truncated file lacks. Raises UsageError if the file is damaged, or not of
    torch.save."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip() if checksums else None
            named = any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
        raise UsageError(f"{file} is damaged or not a checkpoint: {error}") from error
    if damaged is not None:
        raise UsageError(f"{file} is damaged: its part {damaged} does not match its checksum")
    if not named:
        raise UsageError(f"{file} is not a checkpoint")
