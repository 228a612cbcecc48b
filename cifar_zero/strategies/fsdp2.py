"""Shards models with torch's fully_shard (FSDP2), which is ZeRO 3 in torch itself (Zhao et al. 2023, "PyTorch FSDP";
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html). Each parameter is a DTensor that is sharded
along its first dimension, or along the dimension that `tensor_parallel.data_dimension` returns."""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cifar_zero.config.run import Run
from cifar_zero.models.cast import cast_buffers
from cifar_zero.strategies import tensor_parallel
from cifar_zero.strategies.mesh import MeshStrategy, by_block
from stepcheck.replay.plain_copy import cast_batch_norm_weights


def build(run: Run) -> MeshStrategy:
    """Returns the strategy that shards parameters, gradients and optimizer state over all ranks."""
    mixed = run.placement.precision == "bf16-mixed"
    policy = MixedPrecisionPolicy()
    if mixed:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    return MeshStrategy(run.placement, partial(shard, policy=policy), casts=mixed)


def shard(net: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shards each block of a model that has `blocks`, and then the rest of the model, over mesh["data_parallel"], in
    place. If mesh["tensor_parallel"] has several ranks, the layers are first split over them.

    The parameters of a block are gathered just before it computes, and freed right after. A model without blocks is
    gathered in full. Under mixed precision, parameters are gathered and used in bfloat16, while gradients are reduced
    and weights are updated in float32.
    """
    if policy.param_dtype is not None:
        cast_buffers(net, policy.param_dtype)
        cast_batch_norm_weights(net)
    if mesh["tensor_parallel"].size() > 1:
        tensor_parallel.split_layers(net, mesh)
    along = tensor_parallel.data_dimension
    by_block(net, partial(fully_shard, mesh=mesh["data_parallel"], mp_policy=policy, shard_placement_fn=along))
