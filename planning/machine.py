"""How much memory a rank may take: of what the user says, or of this machine; sizes in words."""

from __future__ import annotations

import math
import re

from errors import UsageError
from hardware import free_memory_bytes

UNITS = {"": 10**9, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

USABLE = 0.9
"""Share of a device's memory that a plan uses. The rest is for the CUDA context, the workspaces of cuBLAS and NCCL, and
what the allocator cannot use for its fragments: vLLM's gpu_memory_utilization leaves as much by default (vLLM 0.11,
vllm/config/cache.py)."""

CPU_RANK_BYTES = 1_000_000_000
"""What a CPU rank takes before any network: `checks` has where it was measured."""


def size_in_bytes(text: str, flag: str) -> int:
    """The bytes of `80GB`, `24GiB`, `512MiB` or `80`, which is gigabytes (10^9 bytes).

    Raises:
        UsageError: it is no size above 0.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] not in UNITS or not 0 < (size := float(match[1]) * UNITS[match[2]]) < math.inf:
        raise UsageError(f"{flag} {text}: give a size such as 80GB (10^9 bytes), 24GiB (2^30) or 80, which is 80GB")
    return round(size)


def gpu_bytes() -> int:
    """Memory of the smallest of this machine's GPUs."""
    import torch

    return min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count()))


def cpu_rank_bytes(ranks: int) -> int:
    """Free memory of this machine for what a run holds, shared out among so many CPU ranks."""
    return max(0, free_memory_bytes() // ranks - CPU_RANK_BYTES)
