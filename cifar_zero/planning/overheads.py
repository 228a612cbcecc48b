"""Formulas for what a rank holds in addition to model states and activations, in bytes: buckets, copies for the update,
an average of the weights, buffers on the host, and the model while it is built there."""

import math

from cifar_zero.config.run import Run
from cifar_zero.models import MODELS, ThirdParty
from cifar_zero.planning.model_states import FLOAT32, Network, parameter_size

REUSE_ELEMENTS = 10**9
"""ZeRO-3 keeps a gathered parameter if its next use is within so many elements: stage3_max_reuse_distance (DeepSpeed
0.19.8, zero/config.py and partitioned_param_coordinator.py). At the end of the forward pass this holds for the last
half of them, because the backward pass goes through the model in the opposite direction."""


def buckets(run: Run, network: Network) -> int:
    """Returns what the backward pass holds in addition to activations: buckets and temporarily gathered parameters.
    Stage 1 also holds whole gradients, which it reduces at the end of the last backward pass (zero/stage_1_and_2.py,
    without overlap_comm). They are counted in addition to all activations, which is more than it ever holds."""
    size = parameter_size(run.spec, run.placement.precision)
    if run.spec.family == "fsdp2":
        # A block, the block gathered ahead, and the gradients of one block. In mixed precision these have a float32
        # copy, in which they are reduced (reduce_dtype in strategies/fsdp2.py; foreach_reduce in torch 2.15's
        # _fsdp_collectives.py). A model without blocks is one block.
        computed_in = FLOAT32 if run.placement.precision == "32-true" else 2
        copy = FLOAT32 if run.placement.precision == "bf16-mixed" else 0
        return network.largest_block * (3 * computed_in + copy)
    if run.spec.stage == 0:
        return 0
    zero = run.placement.zero
    bucket = min(zero.reduce_bucket_size, network.elements) * size
    if run.spec.stage < 3 and zero.overlap_comm:
        bucket *= 2  # one is filled while the other is sent (zero/stage_1_and_2.py)
    if run.spec.stage == 1:
        return bucket + network.trained * size
    if run.spec.stage == 2:
        return bucket
    return bucket + min(REUSE_ELEMENTS // 2 + zero.prefetch_bucket_size, network.elements) * size


def update(run: Run, network: Network) -> int:
    """Returns the copies of the gradients that the update makes on the device, after the activations are freed."""
    if run.spec.family != "deepspeed" or run.spec.offload_optimizer:
        return 0
    size = parameter_size(run.spec, run.placement.precision)
    part = math.ceil(network.trained / run.placement.world_size)
    if run.spec.stage == 3:
        return min(part, run.placement.zero.sub_group_size) * FLOAT32
    if size == FLOAT32:  # the flat copy that is sent
        return part * size if run.spec.stage > 0 else network.trained * size
    if run.spec.stage > 0:  # flat, then in float32 (zero/stage_1_and_2.py, step)
        return part * (size + FLOAT32)
    # At most float32 gradients, and those again, flat, for the norm (DeepSpeed 0.19.8, fp16/unfused_optimizer.py).
    return network.trained * 2 * FLOAT32


def average(run: Run, network: Network) -> int:
    """Returns the average of the weights (callbacks/averaging.py): float32, with a float32 copy of cast weights."""
    if not (run.recipe.ema or run.recipe.swa_from):
        return 0
    ranks = run.placement.world_size if run.spec.stage == 3 else 1
    copies = 2 if parameter_size(run.spec, run.placement.precision) < FLOAT32 else 1
    return network.trained // ranks * FLOAT32 * copies


def host_buffers(run: Run, network: Network) -> int:
    """Returns what offloading needs on the host in addition to the offloaded tensors."""
    part = math.ceil(network.trained / run.placement.world_size)
    if run.spec.offload_optimizer == "nvme":  # the sub-group that is updated
        return min(part, run.placement.zero.sub_group_size) * 4 * FLOAT32
    if run.spec.offload_optimizer and run.spec.stage < 3:
        # Updated weights on their way back (param_buffer_of_bit16_for_cpu_offload_groups), and the gradients of several
        # micro-batches (accumulated_grads_in_cpu, zero/stage_1_and_2.py).
        copies = 2 if run.placement.accumulate > 1 else 1
        return part * parameter_size(run.spec, run.placement.precision) * copies
    return 0


def built_on_host(run: Run, network: Network) -> int:
    """Returns what the model takes on the host while it is built, before it is cast and sharded. It is built in float32
    (in bfloat16 with bf16-true), by fsdp2 on the host. Stage 3 shards each layer right after it is built
    (deepspeed/strategy.py), but builds models of other packages whole on the host."""
    if run.spec.family != "fsdp2" and run.spec.stage < 3:
        return 0
    size = network.elements * (2 if run.placement.precision == "bf16-true" else FLOAT32)
    if run.spec.family == "fsdp2" or issubclass(MODELS[run.recipe.model.name], ThirdParty):
        return size
    on_host = run.spec.offload_parameters == "cpu" or (run.on_cpu and not run.spec.offload_parameters)
    return math.ceil(size / run.placement.world_size) if on_host else 0
