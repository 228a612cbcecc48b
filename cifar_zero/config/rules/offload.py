"""What DeepSpeed's switches need: those of ZeRO 3 (--zero), of offloading and of SuperOffload (--offload)."""

from __future__ import annotations

from dataclasses import fields

from cifar_zero.checkpoints.resume import IF_ANY
from cifar_zero.config.flags import Config, OffloadConfig, ZeROConfig
from cifar_zero.config.strategy_specs import STRATEGIES, Spec
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count


def check_switches(config: Config) -> None:
    """Refuses a switch where it would do nothing, or another thing than it says."""
    switches = (("zero", config.zero, ZeROConfig()), ("offload", config.offload, OffloadConfig()))
    given = [
        f"--{section}.{field.name}"
        for section, chosen, default in switches
        for field in fields(chosen)
        if getattr(chosen, field.name) != getattr(default, field.name)
    ]
    if not given:
        return
    if config.ds_config:
        raise UsageError(f"{given[0]} goes into {config.ds_config}, under the name that DeepSpeed has for it")
    spec = STRATEGIES[config.strategy]
    of_stage_3 = [flag for flag in given if flag.startswith("--zero.") or flag == "--offload.ratio"]
    if of_stage_3 and spec.stage != 3:
        raise UsageError(
            f"{of_stage_3[0]} is for ZeRO 3, not for {config.strategy}: use deepspeed_stage_3 or its offload"
        )
    if config.zero.hpz_partition_size > 1:
        _check_second_copy(config, spec)
    if config.zero.quantized_weights or config.zero.quantized_gradients:
        _check_quantized(config)
    if config.offload != OffloadConfig():
        _check_offload(config, spec)


def check_resume(config: Config) -> None:
    """Refuses --resume where nothing could go on."""
    if config.resume not in ("", IF_ANY) and not resumes(config):
        raise UsageError(f"--resume: {_why_not(config)}")


def resumes(config: Config) -> bool:
    """Whether a run can go on from a checkpoint of its own."""
    return not _why_not(config)


def _why_not(config: Config) -> str:
    """DeepSpeed 0.19.8 has the state of Adam in SuperOffload's process, or in the `backup_optimizer` of a ratio, and
    writes that of neither into a checkpoint (superoffload_utils.py, zero/stage3.py). Of a checkpoint of an optimizer on
    NVMe it loads neither the parameters nor the groups that are too small for the disk (engine.py, `load_checkpoint`).
    """
    if config.ds_config:
        return ""
    spec = STRATEGIES[config.strategy]
    if spec.super_offload or config.offload.ratio < 1:
        what = "--offload.ratio" if config.offload.ratio < 1 else config.strategy
        return f"under {what} DeepSpeed keeps Adam's state out of its checkpoints, begin with --weights"
    if spec.offload_optimizer == "nvme":
        return f"{config.strategy} cannot go on, use --strategy deepspeed_stage_3_offload"
    return ""


def _check_second_copy(config: Config, spec: Spec) -> None:
    flag = f"--zero.hpz_partition_size {config.zero.hpz_partition_size}"
    if config.world_size % config.zero.hpz_partition_size:
        raise UsageError(
            f"{flag} does not divide the {config.world_size} rank{'s'[: config.world_size > 1]} of --devices"
        )
    if spec.offload_parameters:  # zero.Init (DeepSpeed 0.19.8) would lay the copy beside the parameters
        raise UsageError(f"{flag}: {config.strategy} has no parameters on the GPU, use deepspeed_stage_3")


def _check_quantized(config: Config) -> None:
    """What DeepSpeed 0.19.8 can do: partition_parameters.py, and all_to_all_quant_reduce in coalesced_collectives.py,
    which asks for the groups `global_*` that utils/groups.py makes for several machines alone."""
    flag = "--zero.quantized_weights" if config.zero.quantized_weights else "--zero.quantized_gradients"
    if config.accelerator == "cpu":
        raise UsageError(f"{flag} needs CUDA: DeepSpeed has its kernels for no other device")
    if config.world_size == 1:
        raise UsageError(f"{flag} is of what ranks send to each other: raise --devices")
    if not config.zero.quantized_gradients:
        return
    flag, gpus = "--zero.quantized_gradients", gpu_count()
    if config.num_nodes == 1:
        raise UsageError(f"{flag} needs two machines or more (--num_nodes): on one use --zero.quantized_weights")
    if config.devices != gpus:
        raise UsageError(f"{flag} needs all {gpus} GPUs of each machine: --devices {gpus}")


def _check_offload(config: Config, spec: Spec) -> None:
    offload, default = config.offload, OffloadConfig()
    if offload.cpuadam_cores_perc != default.cpuadam_cores_perc and not spec.super_offload:
        raise UsageError(
            f"--offload.cpuadam_cores_perc is for deepspeed_stage_3_superoffload, not for {config.strategy}"
        )
    if not spec.offload_optimizer:
        raise UsageError(
            f"--offload.{'pin_memory' if offload.pin_memory else 'ratio'}: {config.strategy} offloads nothing"
        )
    if config.accelerator == "cpu":
        flag = "--offload.pin_memory" if offload.pin_memory else "--offload.ratio"
        raise UsageError(f"{flag} needs a GPU: on the CPU what is offloaded lies beside all else")
    if offload.ratio < 1:
        _check_ratio(config, spec)


def _check_ratio(config: Config, spec: Spec) -> None:
    """What stays on the GPU is updated by a torch.optim.AdamW of DeepSpeed's own, made with the learning rate of the
    first step (`backup_optimizer`, DeepSpeed 0.19.8, zero/stage3.py), which a schedule does not reach."""
    if spec.offload_optimizer != "cpu":
        raise UsageError(f"--offload.ratio is of an optimizer on the CPU: {config.strategy} has it on disk")
    if config.optimizer.name != "adamw":
        raise UsageError("--offload.ratio below 1 runs AdamW alone: add --optimizer adamw")
    if config.schedule.name != "constant":
        raise UsageError(
            "--offload.ratio below 1: DeepSpeed gives the part on the GPU the first learning rate for ever, "
            "use --schedule constant"
        )
