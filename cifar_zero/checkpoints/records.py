"""Whether a checkpoint's files are whole, found out without torch."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from cifar_zero.core.errors import UsageError


def check_records(file: Path, checksums: bool = True) -> None:
    """Compares every record of a file of torch.save with its checksum.

    Args:
        file: to look at.
        checksums: False only reads the list of records at the file's end, which a file that was cut short lacks.

    Raises:
        UsageError: they differ, or it is no such file.
    """
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
