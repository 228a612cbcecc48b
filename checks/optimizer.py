"""What an optimizer needs of the machine and the strategy, offloaded or not."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from config import Config
from errors import UsageError
from optimizers import BY_DEEPSPEED, OFFLOADED_BY
from strategies import STRATEGIES


def check_optimizer(config: Config, raw: dict[str, Any]) -> None:
    """What an optimizer needs of the machine and the strategy; `raw` as in `check_experts`."""
    name, spec = config.optimizer.name, STRATEGIES[config.strategy]
    zero = raw.get("zero_optimization", {})
    stage = zero.get("stage", 0) if config.ds_config else spec.stage
    cuts = spec.family not in ("baseline", "deepspeed") and not config.ds_config
    if name not in OFFLOADED_BY and (stage or cuts):
        raise UsageError(
            f"--optimizer {name} needs whole tensors, and {config.strategy_name} cuts them: "
            "use deepspeed_stage_0, ddp or baseline, or --optimizer adamw"
        )
    if name == "adam8bit":
        _check_bitsandbytes(config)
    offloads = zero.get("offload_optimizer", {}).get("device", "none") != "none" or spec.offload_optimizer
    if offloads and OFFLOADED_BY[name] == BY_DEEPSPEED and not (shutil.which("g++") or shutil.which("c++")):
        raise UsageError(
            f"--strategy {config.strategy_name} compiles DeepSpeed's CPU {name}: install g++ or use --optimizer sgd"
        )


def _check_bitsandbytes(config: Config) -> None:
    if config.accelerator != "gpu":
        raise UsageError("--optimizer adam8bit needs a CUDA GPU: use --optimizer adam")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError("--optimizer adam8bit needs bitsandbytes: pip install bitsandbytes, or use --optimizer adam")


def check_offload(config: Config) -> None:
    """What a strategy that offloads the optimizer needs."""
    spec = STRATEGIES[config.strategy]
    if config.ds_config or not spec.offload_optimizer:
        return
    if spec.super_offload and config.optimizer.name not in ("adam", "adamw"):
        raise UsageError(f"--strategy {config.strategy} runs Adam alone: add --optimizer adam")
    if spec.offload_optimizer == "nvme":
        _check_nvme(config.nvme_path)


def _check_nvme(path: str) -> None:
    if not path:
        raise UsageError("--strategy deepspeed_stage_3_offload_nvme needs --nvme_path DIRECTORY on a local disk")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--nvme_path {path} is not a directory that can be written")
    if not ctypes.util.find_library("aio") or not Path("/usr/include/libaio.h").exists():
        raise UsageError(
            "NVMe offload needs libaio (Debian: apt-get install libaio-dev); without it use deepspeed_stage_3_offload"
        )
