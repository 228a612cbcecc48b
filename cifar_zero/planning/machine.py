"""The memory that is available to a rank, on this machine or as given by the user."""

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from cifar_zero.config.flags import Config
from cifar_zero.config.rules.devices import CPU_RANK_BYTES
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import free_memory_bytes

UNITS = {"": 10**9, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

USABLE = 0.9
"""Share of a device's memory that a plan uses. The rest is for the CUDA context, the workspaces of cuBLAS and NCCL, and
fragmentation of the allocator: vLLM's gpu_memory_utilization leaves as much by default (vLLM 0.11,
vllm/config/cache.py)."""


@dataclass(frozen=True)
class Room:
    """Bytes available to a rank; None: unknown, and not checked."""

    device: int
    host: int | None
    shared: bool = False  # whether the device is the CPU, so that offloaded tensors stay in the same memory
    disk: int | None = None  # free space of --nvme_path
    elsewhere: bool = False
    """Whether this is another machine, which may have what this one lacks (a compiler, bitsandbytes, --nvme_path)."""


def available(config: Config, device_memory: str | None = None, host_memory: str | None = None) -> Room:
    """Returns what is available to a rank on the machine with this --device_memory, None: on this machine now. Without
    `host_memory`, of a node, it is what is free here. Raises UsageError: a memory is no size."""
    assert config.devices != "auto"
    on_cpu = config.accelerator == "cpu"
    if device_memory is not None:
        size = size_in_bytes(device_memory, "--device_memory")
        usable = max(0, size - CPU_RANK_BYTES) if on_cpu else round(USABLE * size)
        room = Room(usable, None, shared=on_cpu, elsewhere=True)
    else:
        path = config.nvme_path
        disk = shutil.disk_usage(path).free // config.devices if path and Path(path).is_dir() else None
        host = max(0, free_memory_bytes() // config.devices - CPU_RANK_BYTES)
        room = Room(host, None, True, disk) if on_cpu else Room(free_gpu_bytes(config.devices), host, disk=disk)
    if host_memory is None:
        return room
    host = max(0, size_in_bytes(host_memory, "--host_memory") // config.devices - CPU_RANK_BYTES)
    return replace(room, host=host, device=host if room.shared and device_memory is None else room.device)


def size_in_bytes(text: str, flag: str) -> int:
    """Returns the bytes of `80GB`, `24GiB`, `512MiB` or `80`, which is gigabytes. Raises UsageError: it is no size."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] not in UNITS or not 1 <= (size := float(match[1]) * UNITS[match[2]]) < 1e18:
        raise UsageError(f"{flag} {text}: give a size such as 80GB (10^9 bytes), 24GiB (2^30) or 80, which is 80GB")
    return round(size)


def free_gpu_bytes(devices: int) -> int:
    """Returns what a rank may use on the fullest of the first `devices` GPUs, without what others use there now, which
    is unknown without NVIDIA's pynvml: asking CUDA itself would take GPU memory."""
    import torch

    def free(gpu: int) -> int:
        total = torch.cuda.get_device_properties(gpu).total_memory
        try:
            return round(USABLE * total) - torch.cuda.device_memory_used(gpu)
        except (ModuleNotFoundError, RuntimeError):
            return round(USABLE * total)

    return max(0, min(map(free, range(min(devices, torch.cuda.device_count())))))
