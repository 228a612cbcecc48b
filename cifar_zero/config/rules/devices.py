"""What only a GPU can do, and how many ranks fit into the CPU's memory."""

import os

from cifar_zero.config.run import Run
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import free_memory_bytes

CPU_RANK_BYTES = 1_000_000_000
"""Memory of one CPU rank of the smallest run (measured: 0.9 to 1.1 GB resident, torch 2.15 with DeepSpeed 0.19)."""


def check_on_cpu(run: Run) -> None:
    """Refuses what needs a GPU."""
    if run.config.precision == "16-mixed":
        raise UsageError("--precision 16-mixed needs a GPU: on the CPU use bf16-mixed or 32-true")
    if run.config.activation_offload:
        raise UsageError("--activation_offload needs a GPU: on the CPU --activation_checkpointing saves activations")
    if run.spec.super_offload:
        raise UsageError(
            f"--strategy {run.config.strategy_name} needs a CUDA GPU: on the CPU use deepspeed_stage_3_offload"
        )


def check_cpu_memory(run: Run) -> None:
    """Refuses more CPU ranks than the memory has room for; a launcher's ranks have taken their memory already."""
    devices = run.config.devices
    assert devices != "auto"
    launched = "LOCAL_WORLD_SIZE" in os.environ
    if devices > 1 and not launched and devices * CPU_RANK_BYTES > (free := free_memory_bytes()):
        fit = max(1, free // CPU_RANK_BYTES)
        raise UsageError(f"--devices {devices}: a CPU rank takes about 1 GB, and there is room for {fit} here")


def check_cuda_graphs(run: Run) -> None:
    """Refuses --cuda_graphs where a step is not the same kernels on the same addresses, which a graph replays."""
    if run.on_cpu:
        raise UsageError("--cuda_graphs needs a GPU: --compile compiles the model on the CPU too")
    if run.config.activation_offload:
        raise UsageError(
            "--cuda_graphs keeps the activations in the graph's own memory: leave out --activation_offload"
        )
    if run.config.accumulate > 1:
        raise UsageError("--cuda_graphs cannot add gradients up over --accumulate micro-batches: use --compile")
    if not run.spec.graphs:
        strategy = run.config.strategy_name
        raise UsageError(f"--cuda_graphs: {strategy} may move the parameters in every step: use --compile")


def check_sync_batch_norm(run: Run) -> None:
    """Refuses SyncBatchNorm without GPUs (torch 2.15) or DDP, the only strategy here with which Lightning (2.6.6) uses
    it."""
    if run.on_cpu:
        raise UsageError("--trainer.sync_batchnorm needs a GPU: on the CPU each rank normalises by its micro-batch")
    if run.spec.family != "baseline":
        raise UsageError(f"--trainer.sync_batchnorm is for ddp, not for {run.config.strategy_name}")
