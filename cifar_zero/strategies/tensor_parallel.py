"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019): each layer of a transformer is cut, by torch's DTensor.

Every rank sees the same images and computes its share of the attention heads and of each MLP's hidden units. A block
adds the ranks' results up twice forward and twice backward; what lies between the blocks every rank computes whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from cifar_zero.models.vit import Block
from cifar_zero.strategies.mesh import MeshStrategy

if TYPE_CHECKING:
    from cifar_zero.config.run import Run


def build(run: Run, num_parameters: int) -> MeshStrategy:
    """All ranks together hold one network; `checks` has seen that its heads divide."""
    return MeshStrategy(
        shard,
        data_parallel_size=1,
        tensor_parallel_size=run.world_size,
        process_group_backend="gloo" if run.on_cpu else None,
    )


class ColwiseQKV(ColwiseParallel):
    """Column-wise, for one linear layer that gives queries, keys and values in this order: each rank gets its heads of
    all three.

    The layer stays one DTensor in its plain order, from which a checkpoint is written as any other. torch (2.15) has
    the cut, every n-th piece of each of three parts, under a private name, for FSDP beside tensor parallelism.
    """

    def __init__(self) -> None:
        super().__init__(output_layouts=_StridedShard(2, split_factor=3))

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        heads_of_each = [_StridedShard(0, split_factor=3)]
        for key, whole in [*module.named_parameters()]:
            cut = distribute_tensor(whole, device_mesh, heads_of_each, src_data_rank=None)
            module.register_parameter(key, nn.Parameter(cut))


PLAN: dict[str, Any] = {
    "attention.qkv": ColwiseQKV(),
    "attention.out": RowwiseParallel(),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(),
}
"""Of a block of models/vit.py: its hidden units are cut, and come together in the second layer of each pair."""


def shard(net: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the blocks of a vision transformer; patches, positions, norms and head stay whole on every rank."""
    ranks = mesh["tensor_parallel"]
    for block in net.modules():
        if isinstance(block, Block):
            parallelize_module(block, ranks, PLAN, src_data_rank=None)
            block.attention.heads //= ranks.size()
