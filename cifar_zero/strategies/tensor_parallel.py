"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019): each layer of a transformer is cut, by torch's DTensor.

Every rank sees the same images and computes its share of the attention heads and of each MLP's hidden units. A block
sums the ranks' results twice forward and twice backward; every rank computes what lies between the blocks.
"""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from cifar_zero.config.placement import Placement
from cifar_zero.models.vit import Block
from cifar_zero.strategies.mesh import MeshStrategy, by_block


def build(placement: Placement) -> MeshStrategy:
    """Returns the strategy in which several ranks hold one model, whose heads they divide, and the others replicas."""
    return MeshStrategy(placement, shard)


def shard(net: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the blocks; the ranks with other images average the gradients, as under DDP. With one replica `replicate`
    still cuts each gradient as its parameter is: that of `ColwiseQKV`'s bias is not."""
    split_layers(net, mesh)
    by_block(net, partial(replicate, mesh=mesh["data_parallel"]))


class ColwiseQKV(ColwiseParallel):
    """Cuts a linear layer whose output is queries, keys and values, so that each rank has its heads of all three.

    The layer stays one DTensor in its plain order, so that a checkpoint is written as any other. torch (2.15) has this
    cut, every n-th piece of each of three parts, under a private name, for FSDP combined with tensor parallelism. FSDP
    cannot cut its rows again: see `data_dimension`; the bias, which has nothing else to cut, is whole on every rank.
    """

    def __init__(self) -> None:
        super().__init__(output_layouts=_StridedShard(2, split_factor=3))

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, whole in [*module.named_parameters()]:
            placement = Replicate()
            if key == "weight":
                placement = _StridedShard(0, split_factor=3)
            cut = distribute_tensor(whole, device_mesh, [placement], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(cut))


PLAN: dict[str, Any] = {
    "attention.qkv": ColwiseQKV(),
    "attention.out": RowwiseParallel(),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(),
}
"""Layers of a block of models/vit.py: the first of each pair is cut by columns, the second by rows."""


def split_layers(net: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the blocks of a vision transformer; patches, positions, norms and head stay whole on every rank."""
    ranks = mesh["tensor_parallel"]
    for block in net.modules():
        if isinstance(block, Block):
            parallelize_module(block, ranks, PLAN, src_data_rank=None)
            block.attention.heads //= ranks.size()


def data_dimension(parameter: nn.Parameter) -> Shard | None:
    """Returns the dimension along which FSDP cuts a parameter that may already be cut; None for the first one."""
    if isinstance(parameter, DTensor) and isinstance(parameter.placements[0], _StridedShard):
        return Shard(1)
