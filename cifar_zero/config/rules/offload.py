"""What DeepSpeed's switches need: those of ZeRO (--zero), of offloading and of SuperOffload (--offload)."""

from dataclasses import fields

from cifar_zero.config.flags import OffloadConfig, ZeROConfig
from cifar_zero.config.run import Run
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count

STAGES = {"overlap_comm": (1, 2, 3), "reduce_bucket_size": (1, 2, 3), "round_robin_gradients": (1, 2)}
"""Stages that have a switch of --zero; the others are of stage 3."""

BETWEEN_RANKS = ("overlap_comm", "round_robin_gradients", "quantized_weights", "quantized_gradients")
"""Switches of --zero without effect on a single rank."""


def check_switches(run: Run) -> None:
    """Refuses a switch that would have no effect, or another effect than its name says."""
    config, spec = run.config, run.spec
    switches = (("zero", config.zero, ZeROConfig()), ("offload", config.offload, OffloadConfig()))
    given = [
        f"--{section}.{field.name}"
        for section, chosen, default in switches
        for field in fields(chosen)
        if getattr(chosen, field.name) != getattr(default, field.name)
    ]
    if not given:
        return
    if spec.raw is not None:
        raise UsageError(f"{given[0]} goes into {config.ds_config}, under DeepSpeed's own name")
    for flag in (flag for flag in given if flag.startswith("--zero.") or flag == "--offload.ratio"):
        switch = flag.removeprefix("--zero.")
        stages = STAGES.get(switch, (3,))
        if spec.stage not in stages:
            raise UsageError(
                f"{flag} is for ZeRO {', '.join(map(str, stages))}, not for {config.strategy}: "
                f"use deepspeed_stage_{stages[-1]} or its offload"
            )
        if switch in BETWEEN_RANKS and config.world_size == 1:
            raise UsageError(f"{flag} only affects communication between ranks: it needs --devices 2 or more")
    if config.zero.overlap_comm and run.on_cpu:
        raise UsageError("--zero.overlap_comm needs a GPU: on the CPU communication does not overlap")
    if config.zero.hpz_partition_size > 1:
        _check_second_copy(run)
    if config.zero.quantized_weights or config.zero.quantized_gradients:
        _check_quantized(run)
    if config.offload != OffloadConfig():
        _check_offload(run)


def _check_second_copy(run: Run) -> None:
    flag, ranks = f"--zero.hpz_partition_size {run.config.zero.hpz_partition_size}", run.config.world_size
    if ranks % run.config.zero.hpz_partition_size:
        raise UsageError(f"{flag} does not divide the {ranks} rank{'s'[: ranks > 1]} of --devices")
    if run.spec.offload_parameters:  # zero.Init (DeepSpeed 0.19.8) would put the copy next to the parameters
        raise UsageError(f"{flag}: {run.config.strategy} has no parameters on the GPU, use deepspeed_stage_3")


def _check_quantized(run: Run) -> None:
    """Refuses what DeepSpeed 0.19.8 cannot do (partition_parameters.py; all_to_all_quant_reduce in
    coalesced_collectives.py needs the groups `global_*`, which utils/groups.py makes only for several nodes)."""
    config = run.config
    flag = "--zero.quantized_weights" if config.zero.quantized_weights else "--zero.quantized_gradients"
    if run.on_cpu:
        raise UsageError(f"{flag} needs CUDA: DeepSpeed has its kernels for no other device")
    if not config.zero.quantized_gradients:
        return
    flag, gpus = "--zero.quantized_gradients", gpu_count()
    if config.num_nodes == 1:
        raise UsageError(f"{flag} needs two nodes or more (--num_nodes): on one use --zero.quantized_weights")
    if config.devices != gpus:
        raise UsageError(f"{flag} needs all {gpus} GPUs of each node: --devices {gpus}")


def _check_offload(run: Run) -> None:
    offload, default, strategy = run.config.offload, OffloadConfig(), run.config.strategy
    if offload.cpuadam_cores_perc != default.cpuadam_cores_perc and not run.spec.super_offload:
        raise UsageError(f"--offload.cpuadam_cores_perc is for deepspeed_stage_3_superoffload, not for {strategy}")
    flag = "--offload.pin_memory" if offload.pin_memory else "--offload.ratio"
    if not run.spec.offload_optimizer:
        raise UsageError(f"{flag}: {strategy} offloads nothing")
    if run.on_cpu:
        raise UsageError(f"{flag} needs a GPU: without one, offloaded tensors stay in the same memory")
    if offload.ratio == 1:
        return
    # DeepSpeed (0.19.8, zero/stage3.py, `backup_optimizer`) updates the part on the GPU by a torch.optim.AdamW with the
    # learning rate of the first step, which a schedule does not reach.
    if run.spec.offload_optimizer != "cpu":
        raise UsageError(
            "--offload.ratio needs an optimizer offloaded to the CPU; "
            f"{run.config.strategy} offloads it to NVMe: use deepspeed_stage_3_offload"
        )
    if run.config.optimizer.name != "adamw":
        raise UsageError("--offload.ratio below 1 runs only AdamW: add --optimizer adamw")
    if run.config.schedule.name != "constant":
        raise UsageError(
            "--offload.ratio below 1: DeepSpeed keeps the first learning rate for the part on the GPU, "
            "use --schedule constant"
        )
