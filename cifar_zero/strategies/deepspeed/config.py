"""DeepSpeed's configuration: that of DeepSpeedExamples, and that of a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from cifar_zero import models

if TYPE_CHECKING:
    from cifar_zero.config.run import Run
    from cifar_zero.strategies.deepspeed.strategy import ZeROStrategy

BUCKET_ELEMENTS = 50_000_000  # DeepSpeedExamples, training/cifar/cifar10_deepspeed.py
"""Largest communication bucket, in elements."""

Dtype = Literal["fp32", "bf16", "fp16"]


def get_ds_config(stage: int, dtype: Dtype) -> dict[str, Any]:
    """Returns the configuration of DeepSpeedExamples' CIFAR-10 program (training/cifar/cifar10_deepspeed.py).

    Ready for `deepspeed.initialize`. A run uses its zero_optimization, bf16 and fp16 sections; the command line sets
    the rest (`run_config`).
    """
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {
            "enabled": dtype == "fp16",
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,  # dynamic
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }


def run_config(run: Run, num_parameters: int) -> dict[str, Any]:
    """Returns the configuration of a run's engine.

    The command line owns batch, accumulation, clipping, precision, optimizer and schedule; Lightning adds
    gradient_accumulation_steps. No bucket has more elements than the model, because buckets use memory.
    """
    config, spec = run.config, run.spec
    dtype: Dtype = "fp32" if config.precision == "32-true" else "bf16" if "bf16" in config.precision else "fp16"
    owned = {
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_clipping": config.gradient_clip_val,
        # The optimizer is ours; SGD has no CPU version in DeepSpeed.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if spec.raw is not None:
        return {**_buffers(dtype), **spec.raw, **_precision(dtype, 0), **owned}
    source = get_ds_config(spec.stage, dtype)
    return {
        **owned,
        **_precision(dtype, spec.stage),
        **_buffers(dtype),
        **{key: source[key] for key in ("steps_per_print", "prescale_gradients", "wall_clock_breakdown")},
        "zero_optimization": _zero_section(source["zero_optimization"], run, num_parameters),
    }


def build(run: Run, num_parameters: int) -> ZeROStrategy:
    """Returns the Lightning strategy; see `run_config` for the arguments."""
    from cifar_zero.strategies.deepspeed.strategy import ZeROPrecision, ZeROStrategy

    ds_config = run_config(run, num_parameters)
    offload = ds_config.get("zero_optimization", {}).get("offload_param", {}).get("device")
    strategy = ZeROStrategy(
        config=ds_config,
        precision_plugin=ZeROPrecision(run.config.precision),  # pyright: ignore[reportArgumentType]
        remote_device="nvme" if offload == "nvme" else "cpu",
        process_group_backend="gloo" if run.on_cpu else None,
    )
    strategy.shards_while_building = not issubclass(models.MODELS[run.config.model.name], models.External)
    return strategy


def _precision(dtype: Dtype, stage: int) -> dict[str, Any]:
    source = get_ds_config(stage, dtype)
    return {key: source[key] for key in ("bf16", "fp16") if source[key]["enabled"]}


def _buffers(dtype: Dtype) -> dict[str, Any]:
    """Makes the engine cast buffers too, which DeepSpeed (0.19.8) leaves in float32, except batch norms' statistics."""
    if dtype == "fp32":
        return {}
    return {"data_types": {"buffer_dtype": dtype, "keep_in_fp32_modules": ["running_mean", "running_var"]}}


def _zero_section(source: dict[str, Any], run: Run, num_parameters: int) -> dict[str, Any]:
    config, spec = run.config, run.spec
    bucket = min(BUCKET_ELEMENTS, num_parameters + num_parameters % 2)  # stages 1 and 2 (0.19.8) need an even number
    zero = {
        **source,
        "allgather_bucket_size": bucket,
        "reduce_bucket_size": bucket,
        # Overlapping has a history of wrong losses (DeepSpeed issues 4298, 5347 and 8061); a raw configuration can turn
        # it on.
        "overlap_comm": False,
    }
    offload, pinned = config.offload, {"pin_memory": config.offload.pin_memory}
    if spec.stage == 3:
        zero["sub_group_size"] = config.zero.sub_group_size
        for switch in ("hpz_partition_size", "quantized_weights", "quantized_gradients"):
            zero[f"zero_{switch}"] = getattr(config.zero, switch)
    if spec.offload_optimizer:
        zero["offload_optimizer"] = {"device": spec.offload_optimizer, **pinned, "ratio": offload.ratio}
    if spec.offload_parameters:
        zero["offload_param"] = {"device": spec.offload_parameters, **pinned}
    if spec.super_offload:
        zero["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": offload.cpuadam_cores_perc}
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section, {}).get("device") == "nvme":
            zero[section]["nvme_path"] = config.nvme_path
    if spec.offload_parameters == "nvme":
        zero["offload_param"]["buffer_size"] = _largest_part(run)
    return zero


def _largest_part(run: Run) -> int:
    """Returns the elements of a rank's part of the largest parameter, which a buffer between disk and memory must hold.

    DeepSpeed (0.19.8) allocates five buffers, by default of 10^8 elements each: 2 GB, and too small for vgg16's first
    linear layer on one rank (`get_buffer` in swap_tensor/partitioned_param_swapper.py).
    """
    from cifar_zero.checkpoints.finetuning.network import on_meta

    net = on_meta(run.config.model, run.num_classes, lora=run.config.lora)
    return max(math.ceil(parameter.numel() / run.world_size) for parameter in net.parameters())
