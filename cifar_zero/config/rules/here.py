"""What a run needs of this computer apart from its devices: memory, packages, a compiler, a disk."""

import ctypes.util
import importlib.util
import os
import shutil
from pathlib import Path

from cifar_zero.config.rules.devices import check_cpu_memory
from cifar_zero.config.run import Run
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers import BY_DEEPSPEED, OFFLOADED_BY


def check_here(run: Run) -> None:
    """Refuses what this computer lacks for a run that others could do."""
    if run.on_cpu:
        check_cpu_memory(run)
    optimizer, spec = run.config.optimizer.name, run.spec
    if optimizer == "adam8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError("--optimizer adam8bit needs bitsandbytes: pip install bitsandbytes, or use --optimizer adam")
    compiles = spec.offload_optimizer and OFFLOADED_BY.get(optimizer) == BY_DEEPSPEED
    if compiles and not (shutil.which("g++") or shutil.which("c++")):
        raise UsageError(
            f"--strategy {run.config.strategy_name} compiles DeepSpeed's CPU {optimizer}: install g++ or use "
            "--optimizer sgd"
        )
    if spec.offload_optimizer == "nvme" and spec.raw is None:
        check_nvme(run.config.nvme_path)


def check_nvme(path: str) -> None:
    """Refuses a missing directory, and a computer without libaio, against which DeepSpeed compiles its I/O."""
    if not path:
        raise UsageError("--strategy deepspeed_stage_3_offload_nvme needs --nvme_path DIRECTORY on a local disk")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--nvme_path {path} is not a directory that can be written")
    if not ctypes.util.find_library("aio") or not Path("/usr/include/libaio.h").exists():
        raise UsageError(
            "NVMe offload needs libaio (Debian: apt-get install libaio-dev); without it use deepspeed_stage_3_offload"
        )
