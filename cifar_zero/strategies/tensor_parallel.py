"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019): each layer of a transformer is cut, by torch's DTensor.

Every rank sees the same images and computes its share of the attention heads and of each MLP's hidden units. A block
sums the ranks' results twice forward and twice backward; every rank computes what lies between the blocks.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from cifar_zero.config.run import Run
from cifar_zero.models.vit import Block
from cifar_zero.strategies.mesh import MeshStrategy


def build(run: Run, num_parameters: int) -> MeshStrategy:
    """Returns the strategy in which all ranks together hold one model; its heads are divisible by the ranks."""
    return MeshStrategy(run, shard, together=True)


class ColwiseQKV(ColwiseParallel):
    """Cuts a linear layer whose output is queries, keys and values, so that each rank has its heads of all three.

    The layer stays one DTensor in its plain order, so that a checkpoint is written as any other. torch (2.15) has this
    cut, every n-th piece of each of three parts, under a private name, for FSDP combined with tensor parallelism.
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
"""Layers of a block of models/vit.py: the first of each pair is cut by columns, the second by rows."""


def shard(net: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the blocks of a vision transformer; patches, positions, norms and head stay whole on every rank."""
    ranks = mesh["tensor_parallel"]
    for block in net.modules():
        if isinstance(block, Block):
            parallelize_module(block, ranks, PLAN, src_data_rank=None)
            block.attention.heads //= ranks.size()
