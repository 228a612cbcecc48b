"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019): torch's DTensor splits the layers of a transformer over ranks.

Every rank gets the same images, and computes its share of the attention heads and of each MLP's hidden units, and all
other operations in full. A block sums the ranks' results twice in the forward pass and twice in the backward pass.
"""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from cifar_zero.config.run import Run
from cifar_zero.models.vit import Block
from cifar_zero.strategies.mesh import MeshStrategy, by_block


def build(run: Run) -> MeshStrategy:
    """Returns the strategy in which a group of ranks holds one model and divides its attention heads. Other groups hold
    replicas."""
    return MeshStrategy(run.placement, shard)


def shard(net: nn.Module, mesh: DeviceMesh) -> None:
    """Splits the layers inside each block over the ranks of mesh["tensor_parallel"], in place. The ranks of
    mesh["data_parallel"] average their gradients, as under DDP. `replicate` is applied even with one replica, because
    the gradient of `ColwiseQKV`'s bias would otherwise have a different placement from the bias."""
    split_layers(net, mesh)
    by_block(net, partial(replicate, mesh=mesh["data_parallel"]))


class ColwiseQKV(ColwiseParallel):
    """Splits a linear layer that outputs queries, keys and values, so that each rank has its heads of all three.
    Contiguous rows would give the queries to one rank and the values to another.

    `_StridedShard`, a private placement of torch (2.15), splits the three separately. The weight stays one DTensor with
    its rows in the plain order, so that a checkpoint needs no conversion. FSDP cannot split the rows again, and splits
    the columns (see `data_dimension`). The bias has no columns, so tensor parallelism does not split it, and FSDP can.
    """

    def __init__(self) -> None:
        super().__init__(output_layouts=_StridedShard(2, split_factor=3))

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, full in [*module.named_parameters()]:
            placement = Replicate()
            if key == "weight":
                placement = _StridedShard(0, split_factor=3)
            own = distribute_tensor(full, device_mesh, [placement], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(own))


PLAN: dict[str, Any] = {
    "attention.qkv": ColwiseQKV(),
    "attention.out": RowwiseParallel(),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(),
}
"""How each layer in a block of models/vit.py is split. The first layer of the attention and of the MLP is split by its
outputs, the rows of torch's weight (Colwise), and the second by its inputs (Rowwise)."""


def split_layers(net: nn.Module, mesh: DeviceMesh) -> None:
    """Splits the layers in each block of a vision transformer over the ranks of mesh["tensor_parallel"], in place, and
    divides the number of heads. All other layers stay whole."""
    ranks = mesh["tensor_parallel"]
    for block in net.modules():
        if isinstance(block, Block):
            parallelize_module(block, ranks, PLAN, src_data_rank=None)
            block.attention.heads //= ranks.size()


def data_dimension(parameter: nn.Parameter) -> Shard | None:
    """Returns the dimension along which FSDP shards a parameter that tensor parallelism may already have split: the
    second for `ColwiseQKV`'s weight, else None, which stands for the first."""
    if isinstance(parameter, DTensor) and isinstance(parameter.placements[0], _StridedShard):
        return Shard(1)
