"""What this computer has, and the versions of its software; torch is imported only where there is a GPU driver, because
that takes seconds."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]

PACKAGES = ("torch", "lightning", "deepspeed", "torchmetrics")

DRIVER = Path("/sys/module/nvidia/version")  # file in which Linux shows the version of NVIDIA's driver, if it is loaded

CGROUPS = Path("/sys/fs/cgroup")  # control groups of Linux, version 2


def has_gpu_driver() -> bool:
    """Returns whether a GPU driver is loaded."""
    files = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA on Linux, NVIDIA under WSL 2, AMD ROCm
    return any(Path(file).exists() for file in files)


def gpu_count() -> int:
    """Returns the number of GPUs that torch can use."""
    if not has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def has_bfloat16() -> bool:
    """Returns whether the first of this computer's GPUs computes in bfloat16: NVIDIA's from compute capability 8.0."""
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def free_memory_bytes() -> int:
    """Returns the memory that new processes can use without swapping and within the limits of their control groups."""
    return max(0, min([psutil.virtual_memory().available, *_left_in_groups()]))


def _left_in_groups() -> list[int]:
    """Returns, for each control group that limits this process (a container's, for example), the limit less its use;
    cached files are given up first (kernel.org, admin-guide/cgroup-v2)."""
    own, left = Path("/proc/self/cgroup"), list[int]()
    if own.exists():
        group = CGROUPS / own.read_text().rpartition("0::/")[2].strip()  # the line of version 2 is the last one
        for folder in (group, *group.parents):
            limit = folder / "memory.max"
            if limit.exists() and (most := limit.read_text().strip()) != "max":
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / "memory.current").read_text()) - int(counts.get("inactive_file", 0))
                left.append(int(most) - used)
    return left


def cores() -> list[int]:
    """Returns the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def core_count() -> int:
    """Returns the number of cores that this process may run on."""
    return len(cores())


def share_of_cores(rank: int, ranks: int) -> set[int]:
    """Returns one rank's share of the cores: neighbours, the same number for each rank, at least one. A rank that is
    bound to its cores was measured 7 % faster than a free one, and its slowest steps a third faster."""
    mine = cores()
    each = max(1, len(mine) // ranks)
    first = rank * each % len(mine)
    return set(mine[first : first + each])


def cpu_name() -> str:
    """Returns the name of this computer's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    if found:
        return found[1]
    return platform.processor() or platform.machine()


def this_computer() -> dict[str, str]:
    """Returns host, operating system, processor, cores and memory, as a report names them."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": cpu_name(),
        "cores": str(core_count()),
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB",
    }


def versions() -> dict[str, str | None]:
    """Returns the versions of the packages that a result depends on; None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "python": platform.python_version()}


def gpu_versions() -> dict[str, str]:
    """Returns the versions of NCCL and of NVIDIA's driver; torch has a GPU."""
    from torch.cuda import nccl

    driver = DRIVER.read_text().strip() if DRIVER.is_file() else "unknown"
    return {"nccl": ".".join(map(str, nccl.version())), "driver": driver}


def git_commit(folder: Path = REPOSITORY) -> str | None:
    """Returns the commit checked out in a folder, with -dirty if tracked files differ; None if git knows none."""
    if not (folder / ".git").exists():  # installed: an enclosing repository is another project's
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # git is not installed, or the repository has no commit yet
        return None
