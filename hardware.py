"""What this machine has, found out without importing torch where there is no GPU driver."""

import os
import platform
from pathlib import Path

import psutil

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Present where a GPU driver is loaded: NVIDIA on Linux, NVIDIA under WSL 2, AMD ROCm."""


def gpu_count() -> int:
    """GPUs that torch can use; torch is only imported where a driver is there at all."""
    if not any(Path(file).exists() for file in DRIVER_FILES):
        return 0
    import torch

    return torch.cuda.device_count()


def free_memory_bytes() -> int:
    """Memory that new processes can have without swapping."""
    return psutil.virtual_memory().available


def core_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
