"""How much memory a rank may take: of what the user says, or of this machine; sizes in words."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from checks.devices import CPU_RANK_BYTES
from errors import UsageError
from hardware import free_memory_bytes

UNITS = {"": 10**9, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

USABLE = 0.9
"""Share of a device's memory that a plan uses. The rest is for the CUDA context, the workspaces of cuBLAS and NCCL, and
what the allocator cannot use for its fragments: vLLM's gpu_memory_utilization leaves as much by default (vLLM 0.11,
vllm/config/cache.py)."""


def size_in_bytes(text: str, flag: str) -> int:
    """The bytes of `80GB`, `24GiB`, `512MiB` or `80`, which is gigabytes (10^9 bytes).

    Raises:
        UsageError: it is no size, or not even a byte.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] not in UNITS or not 1 <= (size := float(match[1]) * UNITS[match[2]]) < 1e18:
        raise UsageError(f"{flag} {text}: give a size such as 80GB (10^9 bytes), 24GiB (2^30) or 80, which is 80GB")
    return round(size)


def bytes_per_second(text: str, flag: str) -> float:
    """Returns the bytes of `100Gbit/s`, `100gbit`, `12.5GB/s` or `12.5GB`, in powers of ten.

    Raises:
        UsageError: it is no rate; Gb could mean either, and is refused.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(B|[bB]it)(?:/s|ps)?\s*", text)
    scale = UNITS[match[2].lower()] if match and match[2] else 1
    rate = float(match[1]) * scale / (1 if match[3] == "B" else 8) if match else 0.0
    if not 1 <= rate < 1e18:
        raise UsageError(f"{flag} {text}: give a rate such as 100Gbit/s or 12.5GB/s")
    return rate


def gpu_bytes(devices: int) -> int:
    """Memory of the smallest of so many of this machine's GPUs, the first ones, or of all where there are fewer."""
    return min(_total_and_used(gpu)[0] for gpu in _first_gpus(devices))


def free_gpu_bytes(devices: int) -> int:
    """What a rank may take of the fullest of these GPUs, beside what has memory there now."""
    return max(0, min(round(USABLE * total) - used for total, used in map(_total_and_used, _first_gpus(devices))))


def _first_gpus(devices: int) -> range:
    import torch

    return range(min(devices, torch.cuda.device_count()))


def _total_and_used(gpu: int) -> tuple[int, int]:
    """Bytes of a GPU; without NVIDIA's pynvml nothing is known to be used, as asking CUDA itself takes memory there."""
    import torch

    total = torch.cuda.get_device_properties(gpu).total_memory
    try:
        return total, torch.cuda.device_memory_used(gpu)
    except (ModuleNotFoundError, RuntimeError):
        return total, 0


def disk_bytes(path: str, ranks: int) -> int | None:
    """Free space of --nvme_path for each of so many ranks; None where there is no such directory."""
    return shutil.disk_usage(path).free // ranks if path and Path(path).is_dir() else None


def cpu_rank_bytes(ranks: int) -> int:
    """Free memory of this machine for what a run holds, shared out among so many processes that take their own."""
    return max(0, free_memory_bytes() // ranks - CPU_RANK_BYTES)
