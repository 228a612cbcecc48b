"""What the machine has: its ranks, its memory, and what is for GPUs alone."""

from __future__ import annotations

import os

from cifar_zero.config.flags import Config
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import free_memory_bytes

CPU_RANK_BYTES = 1_000_000_000
"""Memory of one CPU rank of the smallest run (measured: 0.9 to 1.1 GB resident, torch 2.15 with DeepSpeed 0.19)."""


def settle_devices(config: Config, gpus: int) -> None:
    """Puts the number of ranks for `auto`, or what the launcher says; `gpus` are those that torch can use."""
    if "LOCAL_WORLD_SIZE" in os.environ:  # the ranks are there already, whoever has started them
        config.devices = int(os.environ["LOCAL_WORLD_SIZE"])
        config.num_nodes, left = divmod(int(os.environ["WORLD_SIZE"]), config.devices)
        if left:
            raise UsageError(f"{os.environ['WORLD_SIZE']} ranks, {config.devices} here: give each machine as many")
    elif config.devices == "auto":
        config.devices = max(1, gpus)
    if gpus and config.devices > gpus:
        raise UsageError(f"--devices {config.devices}: this machine has {gpus} GPU{'s'[: gpus > 1]}")


def check_on_cpu(config: Config) -> None:
    """What only a GPU can do."""
    if config.precision == "16-mixed":
        raise UsageError("--precision 16-mixed needs a GPU: on the CPU use bf16-mixed or 32-true")
    if config.activation_offload:
        raise UsageError("--activation_offload needs a GPU: on the CPU --activation_checkpointing saves activations")
    if STRATEGIES[config.strategy].super_offload and not config.ds_config:
        raise UsageError(f"--strategy {config.strategy} needs a CUDA GPU: on the CPU use deepspeed_stage_3_offload")


def check_cpu_memory(config: Config) -> None:
    """What ranks on the CPU have no memory for."""
    assert config.devices != "auto"
    launched = "LOCAL_WORLD_SIZE" in os.environ  # the ranks have taken their memory already
    if config.devices > 1 and not launched and config.devices * CPU_RANK_BYTES > (free := free_memory_bytes()):
        fit = max(1, free // CPU_RANK_BYTES)
        raise UsageError(f"--devices {config.devices}: a CPU rank takes about 1 GB, and there is room for {fit} here")


def check_cuda_graphs(config: Config) -> None:
    """A graph replays the same kernels on the same addresses."""
    spec = STRATEGIES[config.strategy]
    if config.accelerator == "cpu":
        raise UsageError("--cuda_graphs needs a GPU: --compile compiles the network on the CPU too")
    if config.activation_offload:
        raise UsageError(
            "--cuda_graphs keeps the activations in the graph's own memory: leave out --activation_offload"
        )
    if config.accumulate > 1:
        raise UsageError("--cuda_graphs cannot add gradients up over --accumulate micro-batches: use --compile")
    if spec.stage == 3 or spec.family not in ("baseline", "deepspeed") or config.ds_config:
        raise UsageError(f"--cuda_graphs: {config.strategy_name} may move the parameters in every step: use --compile")


def check_sync_batch_norm(config: Config) -> None:
    """torch's SyncBatchNorm (2.15) needs GPUs; of the strategies here Lightning (2.6.6) uses it under DDP alone."""
    if config.accelerator == "cpu":
        raise UsageError("--trainer.sync_batchnorm needs a GPU: on the CPU each rank normalises by its micro-batch")
    if config.ds_config or STRATEGIES[config.strategy].family != "baseline":
        raise UsageError(f"--trainer.sync_batchnorm is for ddp, not for {config.strategy_name}")
