"""Describes the hardware of this computer and the versions of its software. torch, whose import takes seconds, is
imported only by the functions about GPUs other than `has_gpu_driver`. `gpu_count` and `gpu_memory_bytes` import it only
if there is a GPU driver."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

from stepcheck.control_groups import left_in_groups

REPOSITORY = Path(__file__).parents[2]

PACKAGES = ("torch", "lightning", "deepspeed", "torchmetrics")

DRIVER = Path("/sys/module/nvidia/version")  # file with the version of NVIDIA's driver, if Linux has loaded it


def has_gpu_driver() -> bool:
    """Returns whether a driver for NVIDIA or AMD GPUs is loaded."""
    files = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA on Linux, NVIDIA under WSL 2, AMD ROCm
    return any(Path(file).exists() for file in files)


def gpu_count() -> int:
    """Returns the number of GPUs that torch can use."""
    if not has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def has_bfloat16() -> bool:
    """Returns whether torch's current GPU computes in bfloat16, as NVIDIA's GPUs do from compute capability 8.0 on.
    Returns False without a GPU. Imports torch."""
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def free_memory_bytes() -> int:
    """Returns how many bytes of CPU memory new processes can use without swapping and within the limits of this
    process's control groups."""
    return max(0, min([psutil.virtual_memory().available, *left_in_groups()]))


def memory_bytes() -> int:
    """Returns the CPU memory of this computer, used or not."""
    return psutil.virtual_memory().total


def gpu_memory_bytes() -> list[int]:
    """Returns the bytes of memory of each GPU of this computer, used or not."""
    if not gpu_count():
        return []
    import torch

    return [torch.cuda.get_device_properties(number).total_memory for number in range(gpu_count())]


def cores() -> list[int]:
    """Returns the IDs of the CPU cores that this process may run on, in ascending order."""
    return sorted(os.sched_getaffinity(0))


def core_count() -> int:
    return len(cores())


def share_of_cores(rank: int, ranks: int) -> set[int]:
    """Returns the IDs of the CPU cores for one of `ranks` ranks on this computer. Each rank gets the same number of
    neighbouring cores, at least one. If there are more ranks than cores, ranks share cores. A rank bound to its cores
    was measured 7 % faster than an unbound rank, and its slowest steps a third faster."""
    mine = cores()
    each = max(1, len(mine) // ranks)
    first = rank * each % len(mine)
    return set(mine[first : first + each])


def cpu_name() -> str:
    """Returns the model name of this computer's processor, or the architecture if Linux lists no model name."""
    if name := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
        return name[1]
    return platform.processor() or platform.machine()  # ARM processors have no model name


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of PACKAGES, which can change a result. A package that is not installed has
    None."""
    installed: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return {**installed, "python": platform.python_version()}


def gpu_versions() -> dict[str, str]:
    """Returns the versions of NCCL and of NVIDIA's driver ("unknown" if Linux does not list it). Call it only if torch
    can use a GPU."""
    from torch.cuda import nccl

    driver = DRIVER.read_text().strip() if DRIVER.is_file() else "unknown"
    return {"nccl": ".".join(map(str, nccl.version())), "driver": driver}


def git_commit(folder: Path = REPOSITORY) -> str | None:
    """Returns the commit that is checked out in a folder, followed by -dirty if tracked files differ from it. Returns
    None if the folder is not the top of a git repository or has no commit, or if git is not installed or fails."""
    if not (folder / ".git").exists():  # installed package: an enclosing repository belongs to another project
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # git is not installed, or the repository has no commit yet
        return None
