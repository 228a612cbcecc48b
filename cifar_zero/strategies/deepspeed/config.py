"""DeepSpeed's configuration of a run."""

import math
from typing import Any

from cifar_zero import models
from cifar_zero.checkpoints.finetuning.network import on_meta
from cifar_zero.config import ds_config
from cifar_zero.config.deepspeed_examples import Dtype, get_ds_config
from cifar_zero.config.run import Run
from cifar_zero.optimizers import BY_DEEPSPEED, OFFLOADED_BY
from cifar_zero.strategies.deepspeed.strategy import ZeROPrecision, ZeROStrategy


def run_config(run: Run, num_parameters: int) -> dict[str, Any]:
    """Returns the configuration of a run's engine. The command line owns batch, accumulation, clipping, precision,
    optimizer and schedule; Lightning adds gradient_accumulation_steps. No bucket is larger than the model."""
    config, spec = run.config, run.spec
    dtype: Dtype = "fp32" if config.precision == "32-true" else "bf16" if "bf16" in config.precision else "fp16"
    owned = {
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_clipping": config.gradient_clip_val,
        # The optimizer is ours; SGD has no CPU version in DeepSpeed.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    source = get_ds_config(spec.stage, dtype)
    raw = spec.raw or ds_config.for_engine(source)
    whole, reduced = num_parameters + num_parameters % 2, config.zero.reduce_bucket_size
    buckets = {
        "allgather_bucket_size": min(source["zero_optimization"]["allgather_bucket_size"], whole),
        "reduce_bucket_size": min(reduced + reduced % 2, whole),  # stages 1 and 2 (0.19.8) need an even number
    }
    by_flags = {} if spec.raw else {**buckets, **_zero_section(run)}
    if by_flags and spec.stage == 3:
        # DeepSpeed's own linear layer (0.19.8, zero/linear.py) is Python, and saves memory only if weights are sharded.
        by_flags["memory_efficient_linear"] = num_parameters > config.zero.param_persistence_threshold
    # Left to itself, DeepSpeed (0.19.8) keeps all buffers in float32, not only the statistics of batch norms.
    types = {"buffer_dtype": dtype, "keep_in_fp32_modules": ["running_mean", "running_var"]}
    return {
        **({} if dtype == "fp32" else {"data_types": types}),
        **raw,
        **{key: {**raw.get(key, source[key]), "enabled": key == dtype} for key in ("bf16", "fp16")},
        **owned,
        "zero_optimization": {**buckets, **raw["zero_optimization"], **by_flags},
    }


def build(run: Run, elements: int = 0) -> ZeROStrategy:
    """Returns the Lightning strategy, for the run's own model or for another one of so many `elements`."""
    engine = run_config(run, elements or sum(_sizes(run)))
    offload = engine["zero_optimization"].get("offload_param", {}).get("device")
    precision = ZeROPrecision(run.config.precision)  # pyright: ignore[reportArgumentType]
    precision.casts_batches = elements > 0
    strategy = ZeROStrategy(
        config=engine,
        precision_plugin=precision,
        remote_device=offload,  # where the shards are
        process_group_backend="gloo" if run.on_cpu else None,
    )
    foreign = issubclass(models.MODELS[run.config.model.name], models.Foreign)
    strategy.shards_while_building = not foreign and not elements
    strategy.operators = _operators(run, engine["zero_optimization"], of_user=elements > 0)
    return strategy


def _operators(run: Run, zero: dict[str, Any], of_user: bool) -> tuple[str, ...]:
    """Returns the operators that offloading needs; a user's own module makes its optimizer itself."""
    devices = [zero.get(part, {}).get("device", "none") for part in ("offload_optimizer", "offload_param")]
    adam = devices[0] != "none" and OFFLOADED_BY.get(run.config.optimizer.name) == BY_DEEPSPEED and not of_user
    return ("cpu_adam",) * adam + ("async_io",) * ("nvme" in devices)


def _zero_section(run: Run) -> dict[str, Any]:
    config, spec = run.config, run.spec
    switches = ("overlap_comm", "round_robin_gradients")
    zero: dict[str, Any] = {switch: getattr(config.zero, switch) for switch in switches}
    offload, pinned = config.offload, {"pin_memory": config.offload.pin_memory}
    if spec.stage == 3:
        zero["sub_group_size"] = config.zero.sub_group_size
        for switch in ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters"):
            zero[f"stage3_{switch}"] = getattr(config.zero, switch)
        for switch in ("hpz_partition_size", "quantized_weights", "quantized_gradients"):
            zero[f"zero_{switch}"] = getattr(config.zero, switch)
    if spec.offload_optimizer:
        zero["offload_optimizer"] = {"device": spec.offload_optimizer, **pinned, "ratio": offload.ratio}
    if spec.offload_parameters:
        zero["offload_param"] = {"device": spec.offload_parameters, **pinned}
    if spec.super_offload:
        zero["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": offload.cpuadam_cores_perc}
    if spec.offload_parameters == "nvme":
        zero["offload_optimizer"]["nvme_path"] = zero["offload_param"]["nvme_path"] = config.nvme_path
        # A buffer between disk and memory must hold a rank's part of the largest parameter. DeepSpeed (0.19.8) makes
        # five, by default of 10^8 elements each: 2 GB, and too small for vgg16's first linear layer on one rank
        # (`get_buffer` in swap_tensor/partitioned_param_swapper.py).
        zero["offload_param"]["buffer_size"] = math.ceil(max(_sizes(run)) / config.world_size)
    return zero


def _sizes(run: Run) -> list[int]:
    """Returns the elements of each parameter of the run's model, with its adapters."""
    return [part.numel() for part in on_meta(run.config.model, run.num_classes, lora=run.config.lora).parameters()]
