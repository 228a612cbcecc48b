"""Checks CPU cores, memory, the GPUs, their driver, and the CUDA toolkit with which DeepSpeed compiles."""

from pathlib import Path

from cifar_zero.config.rules.devices import CPU_RANK_BYTES
from cifar_zero.core.hardware import DRIVER_FILES, core_count, cpu_name, free_memory_bytes
from cifar_zero.diagnosis.check import Finding, Options, failed, ok, one_line, warning

NO_GPU = "no GPU, ranks run on the CPU"


def gpu(options: Options) -> Finding:
    """Whether torch can compute on every GPU."""
    if not _has_driver():
        return ok(f"{NO_GPU} ({cpu_name()})")
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return warning(
            "there is a GPU driver, but this torch is built for the CPU and trains there",
            "install the torch that https://pytorch.org/get-started/locally names for this machine",
        )
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            torch.ones(2, device=f"cuda:{index}").sum().item()
    except (RuntimeError, AssertionError) as error:  # an old driver; a GPU that this torch has no kernels for
        return failed(
            f"torch, built for CUDA {torch.version.cuda}, cannot compute on the GPU ({one_line(error)})",
            "update the driver, or install a torch that supports it: https://pytorch.org/get-started/locally",
        )
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    if options.ranks > count:
        return warning(f"{names}: fewer than the {options.ranks} of --ranks", f"train.py --devices {count}")
    return ok(f"{names}; torch is built for CUDA {torch.version.cuda}")


def nvcc(options: Options) -> Finding:
    """Whether nvcc has the CUDA version that torch is built for; with another major version it cannot compile
    DeepSpeed's operators for the GPU (DeepSpeed issues 3223 and 6636)."""
    if not _has_driver():
        return ok(f"not needed: {NO_GPU}")
    import torch
    from deepspeed.ops.op_builder.builder import MissingCUDAException, installed_cuda_version

    if torch.version.cuda is None:
        return ok("not needed: torch is not built for CUDA")
    try:
        major, minor = installed_cuda_version()
    except MissingCUDAException:
        return ok("none: torch's fused Adam is used instead of DeepSpeed's")
    if major != int(torch.version.cuda.split(".")[0]):
        return failed(
            f"nvcc has CUDA {major}.{minor}, torch {torch.version.cuda}: DeepSpeed's operators cannot be compiled",
            f"install the CUDA toolkit {torch.version.cuda} and set CUDA_HOME to it",
        )
    return ok(f"CUDA {major}.{minor}; torch is built for {torch.version.cuda}")


def cores(options: Options) -> Finding:
    """Checks whether each rank has its own CPU core."""
    count = core_count()
    if count < options.ranks:
        return warning(f"{count} for {options.ranks} ranks, which take turns", f"train.py --devices {count}")
    return ok(f"{count}, {count // options.ranks} for each of {options.ranks} ranks")


def memory(options: Options) -> Finding:
    """Whether the ranks fit into memory: one that trains on the CPU takes about 1 GB."""
    free = free_memory_bytes() / 1e9
    found = f"{free:.1f} GB are free"
    if (fit := ranks_in_memory()) < options.ranks:
        fix = f"train.py --devices {fit}" if fit else "end other programs"
        return failed(f"{found}, and {options.ranks} ranks take about 1 GB each", fix)
    return ok(f"{found}, {free / options.ranks:.1f} GB for each of {options.ranks} ranks")


def ranks_in_memory() -> int:
    """Returns how many CPU ranks fit into the free memory, possibly 0."""
    return free_memory_bytes() // CPU_RANK_BYTES


def _has_driver() -> bool:
    return any(Path(file).exists() for file in DRIVER_FILES)
