"""Reads what the installed release of DeepSpeed can do, without importing it."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any


@cache
def deepspeed_folder() -> Path | None:
    """Returns the folder of the installed DeepSpeed, or None."""
    spec = importlib.util.find_spec("deepspeed")
    return Path(spec.origin).parent if spec and spec.origin else None


def unknown(config: dict[str, Any], names: Sequence[str] = ()) -> str:
    """Returns why the installed release of DeepSpeed cannot train with some keys, or "". Older releases accept any key,
    and ignore those that they do not know."""
    missing = sorted({*_keys(config), *names} - _names())
    return f"this release of DeepSpeed has no {missing[0]}" if missing and deepspeed_folder() else ""


def _keys(config: dict[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        yield key
        if isinstance(value, dict):
            yield from _keys(value)


def has_gpu() -> bool:
    return Path("/dev/nvidia0").exists()


def lacks_float16() -> str:
    """Returns why this machine cannot train in float16, or ""."""
    if has_gpu() or "avx512_fp16" in Path("/proc/cpuinfo").read_text():
        return ""
    return "this machine has neither a GPU nor a CPU with float16 (avx512_fp16)"


@cache
def _names() -> set[str]:
    """Returns all words in DeepSpeed's source files that read its configuration."""
    folder = deepspeed_folder()
    files = [*folder.glob("runtime/*.py"), *folder.glob("runtime/zero/*.py")] if folder else []
    return {word for file in files for word in re.findall(r"\w+", file.read_text())}
