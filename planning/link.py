"""What the link between the ranks carries: as the user says it, or as doctor.py --nodes has measured it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from errors import UsageError
from planning.communication import Link

PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

SCHEMA = 1
"""Of the file that doctor.py --nodes --save writes; goes up when a key changes its meaning."""


def bytes_per_second(text: str, flag: str) -> float:
    """The bytes of `100Gbit/s`, `100gbit`, `12.5GB/s` or `12.5GB`, in powers of ten.

    Raises:
        UsageError: it is no rate; Gb may be either, and is refused.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(B|[bB]it)(?:/s|ps)?\s*", text)
    rate = float(match[1]) * PREFIXES[match[2].lower()] / (1 if match[3] == "B" else 8) if match else 0.0
    if not 1 <= rate < 1e18:
        raise UsageError(f"{flag} {text}: give a rate such as 100Gbit/s or 12.5GB/s")
    return rate


def read(file: Path) -> Link:
    """The link that doctor.py --nodes has measured.

    Raises:
        UsageError: the file cannot be read, or is not of the doctor's, or of another version of it.
    """
    try:
        measured = json.loads(file.read_text())
        if (schema := measured["schema"]) != SCHEMA:
            raise UsageError(
                f"--network {file} is of schema {schema}, and {SCHEMA} is read here: measure again with this doctor.py"
            )
        link = Link(float(measured["bus_bytes_per_second"]), float(measured["latency_seconds"]))
        if not (0 < link.bytes_per_second < math.inf and 0 <= link.latency_seconds < math.inf):
            raise ValueError
        return link
    except OSError as error:
        raise UsageError(f"--network {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--network {file} is not what doctor.py --nodes --save writes") from error
