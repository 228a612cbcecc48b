"""Shards models with torch's fully_shard (FSDP2), which is ZeRO 3 in torch itself. Each parameter is a DTensor that is
sharded along its first dimension, or along the dimension that `tensor_parallel.data_dimension` returns.

Zhao et al. 2023, "PyTorch FSDP"; https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from dataclasses import replace
from functools import partial

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from cifar_zero.config.placement import Placement
from cifar_zero.models.cast import cast_buffers
from cifar_zero.strategies import tensor_parallel
from cifar_zero.strategies.mesh import MeshStrategy, by_block
from stepcheck.replay.plain_copy import cast_batch_norm_weights

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods of a LightningModule, in addition to `forward`, during which its parameters are gathered."""


def build(placement: Placement, shards_module: bool = False) -> MeshStrategy:
    """Returns the strategy that shards parameters, gradients and optimizer state over all ranks.

    Args:
        placement: Where and how to train.
        shards_module: Whether to shard the LightningModule with `shard_module`. Otherwise `shard` shards its attribute
            `net`.
    """
    mixed = placement.precision == "bf16-mixed"
    policy = MixedPrecisionPolicy()
    if mixed:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    shard_fn = partial(shard_module if shards_module else shard, policy=policy)
    fuses = placement.ranks_per_model == 1
    return MeshStrategy(placement, shard_fn, casts=mixed, fuses=fuses, shards_module=shards_module)


def shard(net: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shards each block of a model that has `blocks`, and then the rest of the model. The parameters of a block are
    gathered just before it computes, and the gathered copy is freed right after. A model without blocks is gathered
    whole. Under mixed precision, parameters are gathered and used in the low precision, while gradients are reduced and
    weights are updated in float32."""
    _cast(net, policy)
    if mesh["tensor_parallel"].size() > 1:
        tensor_parallel.split_layers(net, mesh)
    along = tensor_parallel.data_dimension
    by_block(net, partial(fully_shard, mesh=mesh["data_parallel"], mp_policy=policy, shard_placement_fn=along))


def shard_module(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shards a LightningModule as one block, with the parameters that it owns itself. They are gathered during
    `forward` and the methods in STEPS, where any code may use them. The strategy casts the batch, because torch would
    also cast the inputs of a `forward` that a step calls, which plain PyTorch does not."""
    _cast(module, policy)
    fully_shard(module, mesh=mesh["data_parallel"], mp_policy=replace(policy, cast_forward_inputs=False))
    for name in STEPS:
        if is_overridden(name, module):  # pyright: ignore[reportArgumentType]
            register_fsdp_forward_method(module, name)


def _cast(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Casts the buffers of a module to the dtype in which `policy` computes."""
    if policy.param_dtype is not None:
        cast_buffers(module, policy.param_dtype)
        cast_batch_norm_weights(module)
