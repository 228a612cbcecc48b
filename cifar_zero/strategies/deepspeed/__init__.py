"""DeepSpeed's ZeRO under Lightning. This file builds the strategy and its configuration; the other files contain the
strategy itself, its hooks, checkpoints and experts."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning.pytorch.plugins.precision import DeepSpeedPrecision

from cifar_zero.build_model import create_meta_model
from cifar_zero.config import ds_config
from cifar_zero.config.ds_config import Dtype, get_ds_config
from cifar_zero.config.placement import Placement, Precision
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import Spec
from cifar_zero.models import MODELS, ThirdParty
from cifar_zero.models.cast import STATISTICS
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.strategies.deepspeed.strategy import ZeROStrategy

__all__ = ["ZeROStrategy", "build"]

DTYPES: dict[Precision, Dtype] = {"32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16"}


def build(run: Run) -> ZeROStrategy:
    """Returns the strategy for Lightning's Trainer."""
    placement, spec = run.placement, run.spec
    config = engine_config(run)
    precision: Any = DeepSpeedPrecision(placement.precision)  # pyright: ignore[reportArgumentType]
    shards: Any = spec.offload_parameters or None  # where the shards of the parameters are stored
    strategy = ZeROStrategy(config=config, precision_plugin=precision, remote_device=shards)
    if "nvme" in (spec.offload_optimizer, spec.offload_parameters):
        strategy.operators = ("async_io",)
    # CIFARModule casts its images itself, and its soft labels must not be rounded.
    precision.convert_input = lambda data: data
    strategy.shards_while_building = not issubclass(MODELS[run.recipe.model.name], ThirdParty)
    if spec.offload_optimizer and OPTIMIZERS[run.recipe.optimizer.name].compiled:
        strategy.operators = ("cpu_adam", *strategy.operators)
    return strategy


def engine_config(run: Run) -> dict[str, Any]:
    """Returns the configuration of an engine. The command line decides batch size, accumulation, clipping, precision,
    optimizer and schedule, of which Lightning adds train_micro_batch_size_per_gpu, gradient_accumulation_steps and
    gradient_clipping. The buckets are no larger than the model, unless a raw configuration sets them."""
    placement, spec = run.placement, run.spec
    sizes = [parameter.numel() for parameter in create_meta_model(run.recipe, run.num_classes).parameters()]
    dtype = DTYPES[placement.precision]
    example = get_ds_config(spec.stage, dtype)
    config = {**(spec.raw or ds_config.for_engine(example))}
    for key in ("bf16", "fp16"):
        config[key] = {**config.get(key, example[key]), "enabled": key == dtype}
    if dtype != "fp32":
        # By default DeepSpeed (0.19.8) keeps all buffers in float32, not only the statistics of batch norms.
        buffers = {"buffer_dtype": dtype, "keep_in_fp32_modules": [*STATISTICS]}
        config["data_types"] = {**buffers, **config.get("data_types", {})}
    # Accepts optimizers that are not DeepSpeed's, on the CPU too, because DeepSpeed has no SGD for the CPU.
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    total, reduced = sum(sizes) + sum(sizes) % 2, placement.zero.reduce_bucket_size
    buckets = {
        "allgather_bucket_size": min(example["zero_optimization"]["allgather_bucket_size"], total),
        "reduce_bucket_size": min(reduced + reduced % 2, total),  # ZeRO 1 and 2 (0.19.8) need an even number
    }
    zero = config["zero_optimization"]
    if spec.raw:
        config["zero_optimization"] = {**buckets, **zero}
    else:
        by_flags = _zero_section(placement, spec, sizes)
        config["zero_optimization"] = {**zero, **by_flags, **buckets}
    return config


def _zero_section(placement: Placement, spec: Spec, sizes: Sequence[int]) -> dict[str, Any]:
    """Returns the options of DeepSpeed's ZeRO section that the strategy, --zero, --offload and --nvme_path set. `sizes`
    has the number of elements of each parameter. DeepSpeed accepts the names of its fields without the prefix stage3_,
    and ignores options of other stages."""
    offload = placement.offload
    zero: dict[str, Any] = asdict(placement.zero)
    if spec.stage == 3:
        # DeepSpeed's own linear layer (0.19.8, zero/linear.py) is written in Python, and saves memory only if weights
        # are sharded.
        zero["memory_efficient_linear"] = sum(sizes) > placement.zero.param_persistence_threshold
    pinned = {"pin_memory": offload.pin_memory}
    if spec.offload_optimizer:
        zero["offload_optimizer"] = {"device": spec.offload_optimizer, **pinned}
    if spec.offload_parameters:
        zero["offload_param"] = {"device": spec.offload_parameters, **pinned}
    if spec.super_offload:
        zero["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": offload.cpuadam_cores_perc}
    if spec.offload_parameters == "nvme":
        zero["offload_optimizer"]["nvme_path"] = zero["offload_param"]["nvme_path"] = placement.nvme_path
        # A buffer between disk and memory must hold a rank's part of the largest parameter. DeepSpeed (0.19.8) makes
        # five buffers, by default of 10^8 elements each. These take 2 GB, and are too small for vgg16's first linear
        # layer on one rank (`get_buffer` in swap_tensor/partitioned_param_swapper.py).
        zero["offload_param"]["buffer_size"] = math.ceil(max(sizes) / placement.world_size)
    return zero
