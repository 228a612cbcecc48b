"""What a run needs of the computer: a GPU, memory, packages, a compiler, a disk."""

import ctypes.util
import importlib.util
import os
import shutil
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from cifar_zero.config.run import Run
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import free_memory_bytes
from cifar_zero.optimizers import BY_DEEPSPEED, OFFLOADED_BY

CPU_RANK_BYTES = 1_000_000_000
"""Memory of one CPU rank of the smallest run (measured: 0.9 to 1.1 GB resident, torch 2.15 with DeepSpeed 0.19)."""


def check_on_cpu(run: Run) -> None:
    """Refuses what needs a GPU."""
    if run.config.precision == "16-mixed":
        raise UsageError("--precision 16-mixed needs a GPU: on the CPU use bf16-mixed or 32-true")
    if run.config.activation_offload:
        raise UsageError("--activation_offload needs a GPU: on the CPU --activation_checkpointing saves activations")
    if run.spec.super_offload:
        raise UsageError(f"{run.config.strategy_name} needs a CUDA GPU: on the CPU use deepspeed_stage_3_offload")


def check_here(run: Run) -> None:
    """Refuses what this computer lacks and another one may have."""
    devices, optimizer, spec = run.config.devices, run.config.optimizer.name, run.spec
    assert devices != "auto"
    launched = "LOCAL_WORLD_SIZE" in os.environ  # the ranks of a launcher have already taken their memory
    if run.on_cpu and devices > 1 and not launched and devices * CPU_RANK_BYTES > (free := free_memory_bytes()):
        fit = max(1, free // CPU_RANK_BYTES)
        raise UsageError(f"--devices {devices}: a CPU rank takes about 1 GB, and this computer has memory for {fit}")
    if optimizer == "adam8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError("--optimizer adam8bit needs bitsandbytes: pip install bitsandbytes, or use --optimizer adam")
    if spec.size == "tensor_parallel_size" and run.ranks_per_model > 1 and Version(version("torch")) < Version("2.12"):
        raise UsageError(
            f"{run.config.strategy_name} splits layers, which torch {version('torch')} cannot: update torch"
        )
    for name in ("wandb", "mlflow"):
        if name in run.config.logger and importlib.util.find_spec(name) is None:
            raise UsageError(f"--logger {name} needs the package: pip install {name}")
    compiles = spec.offload_optimizer and OFFLOADED_BY.get(optimizer) == BY_DEEPSPEED
    if compiles and not (shutil.which("g++") or shutil.which("c++")):
        raise UsageError(f"{run.config.strategy_name} compiles a CPU {optimizer}: install g++ or use --optimizer sgd")
    if spec.offload_optimizer == "nvme" and spec.raw is None:
        check_nvme(run.config.nvme_path)
    if "nvme" in (spec.offload_optimizer, spec.offload_parameters) and not run.on_cpu:
        from torch.utils.cpp_extension import CUDA_HOME  # here: of torch, which has counted the GPUs

        if CUDA_HOME is None:  # DeepSpeed 0.19.8, ops/op_builder/async_io.py
            raise UsageError(
                "NVMe offload on a GPU is compiled against CUDA: install the CUDA toolkit of torch's version and set "
                "CUDA_HOME to it, or use deepspeed_stage_3_offload"
            )


def check_nvme(path: str) -> None:
    """Refuses a missing directory, and a computer without libaio, which DeepSpeed's I/O is compiled against."""
    if not path:
        raise UsageError("--strategy deepspeed_stage_3_offload_nvme needs --nvme_path DIRECTORY on a local disk")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--nvme_path {path} is not a writable directory")
    if not ctypes.util.find_library("aio") or not Path("/usr/include/libaio.h").exists():
        raise UsageError("NVMe offload needs libaio: apt-get install libaio-dev, or use deepspeed_stage_3_offload")


def check_sync_batch_norm(run: Run) -> None:
    """Refuses SyncBatchNorm without GPUs (torch 2.15), or without DDP (Lightning 2.6.6)."""
    if run.on_cpu:
        raise UsageError("--trainer.sync_batchnorm needs a GPU: on the CPU each rank normalises by its micro-batch")
    if run.spec.family != "baseline":
        raise UsageError(f"--trainer.sync_batchnorm is for ddp, not for {run.config.strategy_name}")
