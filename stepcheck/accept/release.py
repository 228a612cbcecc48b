"""Reads what the installed release of DeepSpeed can do, without importing it."""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepcheck.strategies import config_keys, deepspeed_folder, deepspeed_words, uses_gpus

PROCESSOR = Path("/proc/cpuinfo")  # of Linux


def installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def unknown(config: dict[str, Any], names: Sequence[str] = ()) -> str:
    """Returns why the installed release of DeepSpeed cannot train with the keys of `config` and the words `names`, or
    "". Without DeepSpeed, returns "". DeepSpeed itself ignores unknown top-level keys."""
    known = deepspeed_words(r"\w+", "runtime/*.py", "runtime/zero/*.py")
    missing = sorted({*config_keys(config), *names} - known)
    return f"this release of DeepSpeed has no {missing[0]}" if missing and deepspeed_folder() else ""


def lacks_float16(ranks: int) -> str:
    """Returns why DeepSpeed cannot train in float16 with ranks on this machine, or ""."""
    if uses_gpus(ranks) or (PROCESSOR.exists() and "avx512_fp16" in PROCESSOR.read_text()):
        return ""
    return "this machine has neither a GPU for each rank nor a CPU with float16 (avx512_fp16)"
