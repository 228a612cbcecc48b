"""What a run needs of the machine that it is started on, beside its devices: memory, packages, a compiler, a disk."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from cifar_zero.config.flags import Config
from cifar_zero.config.rules.devices import check_cpu_memory
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers import BY_DEEPSPEED, OFFLOADED_BY


def check_here(config: Config, raw: dict[str, Any]) -> None:
    """Refuses what this machine lacks for a run that others could do; `raw` as in `check_experts`."""
    if config.accelerator == "cpu":
        check_cpu_memory(config)
    name, spec = config.optimizer.name, STRATEGIES[config.strategy]
    if name == "adam8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError("--optimizer adam8bit needs bitsandbytes: pip install bitsandbytes, or use --optimizer adam")
    offload = raw.get("zero_optimization", {}).get("offload_optimizer", {})
    offloads = offload.get("device", "none") != "none" or spec.offload_optimizer
    compiles = offloads and OFFLOADED_BY.get(name) == BY_DEEPSPEED
    if compiles and not (shutil.which("g++") or shutil.which("c++")):
        raise UsageError(
            f"--strategy {config.strategy_name} compiles DeepSpeed's CPU {name}: install g++ or use --optimizer sgd"
        )
    if spec.offload_optimizer == "nvme" and not config.ds_config:
        check_nvme(config.nvme_path)


def check_nvme(path: str) -> None:
    """Refuses a directory that is none, and a machine without libaio, against which DeepSpeed compiles its I/O."""
    if not path:
        raise UsageError("--strategy deepspeed_stage_3_offload_nvme needs --nvme_path DIRECTORY on a local disk")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--nvme_path {path} is not a directory that can be written")
    if not ctypes.util.find_library("aio") or not Path("/usr/include/libaio.h").exists():
        raise UsageError(
            "NVMe offload needs libaio (Debian: apt-get install libaio-dev); without it use deepspeed_stage_3_offload"
        )
