"""DeepSpeed's configuration of a placement."""

import math
from typing import Any

from cifar_zero.config import ds_config
from cifar_zero.config.ds_config import Dtype, get_ds_config
from cifar_zero.config.placement import Placement
from cifar_zero.config.strategy_specs import Spec
from cifar_zero.strategies.deepspeed.strategy import ZeROPrecision, ZeROStrategy


def engine_config(placement: Placement, spec: Spec, num_parameters: int, largest_parameter: int = 0) -> dict[str, Any]:
    """Returns the configuration of an engine, see `strategies.build`. The command line owns batch, accumulation,
    clipping, precision, optimizer and schedule; Lightning adds gradient_accumulation_steps and gradient_clipping. No
    bucket is larger than the model."""
    precision = placement.precision
    dtype: Dtype = "fp32" if precision == "32-true" else "bf16" if "bf16" in precision else "fp16"
    owned = {
        # The optimizer is ours; SGD has no CPU version in DeepSpeed.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    source = get_ds_config(spec.stage, dtype)
    raw = spec.raw or ds_config.for_engine(source)
    whole, reduced = num_parameters + num_parameters % 2, placement.zero.reduce_bucket_size
    buckets = {
        "allgather_bucket_size": min(source["zero_optimization"]["allgather_bucket_size"], whole),
        "reduce_bucket_size": min(reduced + reduced % 2, whole),  # stages 1 and 2 (0.19.8) need an even number
    }
    by_flags = {} if spec.raw else {**buckets, **_zero_section(placement, spec, largest_parameter or num_parameters)}
    if by_flags and spec.stage == 3:
        # DeepSpeed's own linear layer (0.19.8, zero/linear.py) is Python, and saves memory only if weights are sharded.
        by_flags["memory_efficient_linear"] = num_parameters > placement.zero.param_persistence_threshold
    return {
        **raw,
        **{key: {**raw.get(key, source[key]), "enabled": key == dtype} for key in ("bf16", "fp16")},
        **owned,
        "zero_optimization": {**buckets, **raw["zero_optimization"], **by_flags},
    }


def build(placement: Placement, spec: Spec, num_parameters: int, largest_parameter: int) -> ZeROStrategy:
    """Returns Lightning's strategy, see `strategies.build`."""
    engine = engine_config(placement, spec, num_parameters, largest_parameter)
    zero = engine["zero_optimization"]
    strategy = ZeROStrategy(
        config=engine,
        precision_plugin=ZeROPrecision(placement.precision),  # pyright: ignore[reportArgumentType]
        remote_device=zero.get("offload_param", {}).get("device"),  # where the shards are
        process_group_backend="gloo" if placement.on_cpu else None,
    )
    if "nvme" in [zero.get(part, {}).get("device") for part in ("offload_optimizer", "offload_param")]:
        strategy.operators = ("async_io",)
    return strategy


def _zero_section(placement: Placement, spec: Spec, largest_parameter: int) -> dict[str, Any]:
    switches = ("overlap_comm", "round_robin_gradients")
    zero: dict[str, Any] = {switch: getattr(placement.zero, switch) for switch in switches}
    offload, pinned = placement.offload, {"pin_memory": placement.offload.pin_memory}
    if spec.stage == 3:
        zero["sub_group_size"] = placement.zero.sub_group_size
        for switch in ("param_persistence_threshold", "prefetch_bucket_size", "max_live_parameters"):
            zero[f"stage3_{switch}"] = getattr(placement.zero, switch)
    if spec.offload_optimizer:
        zero["offload_optimizer"] = {"device": spec.offload_optimizer, **pinned, "ratio": offload.ratio}
    if spec.offload_parameters:
        zero["offload_param"] = {"device": spec.offload_parameters, **pinned}
    if spec.super_offload:
        zero["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": offload.cpuadam_cores_perc}
    if spec.offload_parameters == "nvme":
        zero["offload_optimizer"]["nvme_path"] = zero["offload_param"]["nvme_path"] = placement.nvme_path
        # A buffer between disk and memory must hold a rank's part of the largest parameter. DeepSpeed (0.19.8) makes
        # five, by default of 10^8 elements each: 2 GB, and too small for vgg16's first linear layer on one rank
        # (`get_buffer` in swap_tensor/partitioned_param_swapper.py).
        zero["offload_param"]["buffer_size"] = math.ceil(largest_parameter / placement.world_size)
    return zero
