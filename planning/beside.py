"""What a rank holds beside its model states, but for activations: buckets, copies for the update, an average of the
weights, and the network that it begins with; by formula, in bytes."""

from __future__ import annotations

import math

from config import Config
from models import MODELS, External
from planning.model_states import FLOAT32, parameter_size
from planning.network import Network
from strategies import Spec
from strategies.deepspeed import BUCKET_ELEMENTS

REUSE_ELEMENTS = 10**9
"""ZeRO-3 keeps a gathered parameter whose next use lies within so many elements: stage3_max_reuse_distance (DeepSpeed
0.19.8, zero/config.py and partitioned_param_coordinator.py). At the end of a forward pass that is true of the last
half of them, through which the backward pass goes in the opposite direction."""

PREFETCH_ELEMENTS = 50_000_000
"""ZeRO-3 gathers so many elements ahead: stage3_prefetch_bucket_size (zero/config.py)."""

SWAP_BUFFERS = 5
"""Buffers through which parameters on a disk pass, each of the largest one's part: buffer_count of offload_param
(DeepSpeed 0.19.8, zero/offload_config.py)."""

SWAPPED_ELEMENTS = 10**8
"""Of the largest parameter, where nothing but the network's size is known: buffer_size there."""


def buckets(spec: Spec, config: Config, network: Network) -> int:
    """Communication buckets and gathered parameters: what lies beside the activations in the backward pass."""
    size = parameter_size(spec, config.precision)
    bucket = min(BUCKET_ELEMENTS, network.elements) * size
    if spec.stage == 1:  # whole gradients, from one micro-batch to the next
        return bucket + (network.trained * size if config.accumulate > 1 else 0)
    if spec.stage == 2:
        return bucket
    if spec.stage == 3:
        ranks_with_a_copy = config.zero.hpz_partition_size
        copy = math.ceil(network.elements / ranks_with_a_copy) * size if ranks_with_a_copy > 1 else 0
        return bucket + copy + min(REUSE_ELEMENTS // 2 + PREFETCH_ELEMENTS, network.elements) * size
    computed_in = 2 if config.precision != "32-true" else FLOAT32
    if spec.family == "fsdp2":
        return _gathered_by_fsdp2(config, network, computed_in)
    return 0


def _gathered_by_fsdp2(config: Config, network: Network, computed_in: int) -> int:
    """A block, the one that is gathered ahead, the gradients of one, and in mixed precision these in float32, in which
    they are reduced (reduce_dtype in strategies/fsdp2.py; foreach_reduce in torch 2.15's _fsdp_collectives.py). A
    network without blocks is given back before its gradients are copied."""
    if network.largest_block == network.elements:
        return network.elements * (computed_in + FLOAT32)
    copy = FLOAT32 if config.precision == "bf16-mixed" else 0
    return network.largest_block * (3 * computed_in + copy)


def passing(spec: Spec, config: Config, network: Network) -> int:
    """What is there after the activations are gone: whole gradients that are sent in one piece or wait for it, the
    copies of the gradients that the update takes, or those of the weights that are averaged in float32."""
    copied = 0 if spec.offload_parameters or parameter_size(spec, config.precision) == FLOAT32 else 1
    return max(_gradients(spec, config, network), copied * _averaged(spec, config, network))


def _gradients(spec: Spec, config: Config, network: Network) -> int:
    if spec.family != "deepspeed":
        return 0
    ranks, size = config.world_size, parameter_size(spec, config.precision)
    if spec.stage == 0:
        # The most that its optimizers of mixed precision have: float32 gradients and, flat, those again for the norm
        # (DeepSpeed 0.19.8, fp16/fused_optimizer.py).
        flat = network.trained * size if ranks > 1 else 0
        return max(flat, network.trained * 2 * FLOAT32 if size < FLOAT32 else 0)
    part = math.ceil(network.trained / ranks)
    if spec.offload_optimizer:
        copies = 0
    elif spec.stage == 3:
        copies = min(part, config.zero.sub_group_size) * FLOAT32
    else:  # flat, and in float32 where they are not yet (zero/stage_1_and_2.py, step)
        copies = part * (size + (FLOAT32 if size < FLOAT32 else 0))
    whole = min(BUCKET_ELEMENTS, network.elements) + network.trained if spec.stage == 1 else 0
    return max(copies, whole * size)


def average(spec: Spec, config: Config, network: Network) -> tuple[int, int]:
    """The average of the weights on the device, and on the host with a copy in float32 of what it is made of."""
    size = _averaged(spec, config, network)
    if not spec.offload_parameters:
        return size, 0
    return 0, size * (2 if parameter_size(spec, config.precision) < FLOAT32 else 1)


def _averaged(spec: Spec, config: Config, network: Network) -> int:
    """Float32 numbers for all trained weights that a rank holds (callbacks/averaging.py)."""
    if not (config.ema or config.swa_from):
        return 0
    ranks = config.world_size if spec.stage == 3 else 1
    own = (
        math.ceil(weight.elements / max(weight.ranks_that_share, ranks)) for weight in network.weights if weight.trained
    )
    return sum(own) * FLOAT32


def host_buffers(spec: Spec, config: Config, network: Network) -> int:
    """What an offloaded optimizer or parameters take beside themselves."""
    part, size = math.ceil(network.trained / config.world_size), parameter_size(spec, config.precision)
    if spec.offload_optimizer == "nvme":
        largest = max(weight.elements for weight in network.weights) if network.groups else SWAPPED_ELEMENTS
        largest = math.ceil(min(largest, network.elements) / config.world_size)
        return SWAP_BUFFERS * largest * size + min(part, config.zero.sub_group_size) * 4 * FLOAT32
    if spec.offload_optimizer and spec.stage < 3:
        # Updated weights on their way back (param_buffer_of_bit16_for_cpu_offload_groups), and the gradients of several
        # micro-batches in the network's format (accumulated_grads_in_cpu, zero/stage_1_and_2.py).
        return part * size * (2 if config.accumulate > 1 else 1)
    return 0


def starting(spec: Spec, config: Config, network: Network) -> tuple[int, int]:
    """What a rank holds on its device and on its host before it trains: the network as it is built.

    In float32, but with bf16-true; on the device but by fsdp2 (tensor_init_context in Lightning 2.6.6,
    strategies/strategy.py, model_parallel.py). Stages 1 and 2 then lay what is trained end to end in a flat
    copy (DeepSpeed 0.19.8, zero/stage_1_and_2.py). Stage 3 cuts each layer as it is made, on the host
    (strategies/zero.py), but those of other packages, whose networks it builds whole.
    """
    built = 2 if config.precision == "bf16-true" else FLOAT32
    own = sum(weight.elements // weight.ranks_that_share for weight in network.weights)
    if spec.family == "fsdp2":
        return 0, built * own
    if spec.stage == 3:
        if issubclass(MODELS[config.model.name], External):
            return 0, built * own
        return 0, 0 if spec.offload_parameters == "nvme" else built * math.ceil(own / config.world_size)
    if spec.stage:
        size = parameter_size(spec, config.precision)
        return max(built * own, size * (own + network.trained)), 0
    return built * own, 0
