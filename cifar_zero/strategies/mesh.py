"""Defines the base class of the strategies fsdp2, tensor_parallel and pipeline, which shard or split the model."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from cifar_zero.build_model import blocks_of
from cifar_zero.config.placement import Placement
from cifar_zero.optimizers import Implementation
from cifar_zero.optimizers.groups import keep_own_options
from cifar_zero.strategies.hooks import Hooks, shard_like, unsharded

Shard = Callable[[nn.Module, DeviceMesh], None]
"""Function that replaces the parameters of a full model, which are the same on every rank, with this rank's shards."""


class MeshHooks(Hooks):
    def optimizer_implementation(self, device_type: str, clips: bool = False) -> Implementation:
        return "torch"

    def data_group(self) -> dist.ProcessGroup:
        return self.strategy.device_mesh["data_parallel"].get_group()

    def compute_dtype(self, parameter: Any) -> torch.dtype:
        if self.strategy.casts and parameter.is_floating_point():
            return torch.bfloat16
        return parameter.dtype


class MeshStrategy(ModelParallelStrategy):
    """Extends Lightning's ModelParallelStrategy: `shard` splits the module's attribute `net`, which holds all
    parameters, just before the optimizer is made, and checkpoints are plain files. To write one, rank 0 gets the full
    tensors one at a time, so that no GPU holds the whole model.

    The mesh has two dimensions: `data_parallel` for the ranks that compute different images, and `tensor_parallel`,
    which is Lightning's only name for the ranks of one model, in a pipeline too.

    Args:
        casts: Whether `shard` makes the model compute in bfloat16.
    """

    hooks = MeshHooks

    def __init__(self, placement: Placement, shard: Shard, *, casts: bool = False):
        super().__init__(
            data_parallel_size=placement.replicas,
            tensor_parallel_size=placement.ranks_per_model,
            save_distributed_checkpoint=False,
        )
        self.casts = casts
        self._shard = shard
        self._sharded = False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def setup(self, trainer: Trainer) -> None:
        if not self._sharded:  # once for the fit and the test after it
            module: Any = self.model
            self._shard(module.net, self.device_mesh)  # pyright: ignore[reportArgumentType]
            self._sharded = True
        super().setup(trainer)
        precision = self.precision_plugin
        hooks = self.hooks(self)
        precision.clip_grad_by_norm = lambda optimizer, clip_val: hooks.clip(precision.main_params(optimizer), clip_val)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.gathered(Strategy.lightning_module_state_dict(self))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: Any = Strategy.optimizer_state(self, optimizer)
        return {**state, "state": self.gathered(state["state"])}

    def gathered(self, states: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns weights, keyed by name, or optimizer states, keyed by parameter index, with full tensors on rank 0,
        and an empty dict on the other ranks. Every rank must call it."""
        return on_host(states, self.is_global_zero)

    load_checkpoint = Strategy.load_checkpoint  # reads a checkpoint of any strategy on every rank

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        full = checkpoint["state_dict"]
        own = self.lightning_module.state_dict()
        shards = {name: shard_like(full[name], like) for name, like in own.items() if name in full}
        self.lightning_module.load_state_dict(shards, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            full = keep_own_options(optimizer, saved)
            parameters: list[Any] = []
            for group in optimizer.param_groups:
                parameters += group["params"]
            state: dict[int, dict[str, Any]] = {}
            for number, entry in full["state"].items():
                parameter = parameters[number]
                if parameter.numel():
                    state[number] = {key: shard_like(value, parameter) for key, value in entry.items()}
            optimizer.load_state_dict({**full, "state": state})


def by_block(net: nn.Module, distribute: Callable[[nn.Module], Any]) -> None:
    """Applies `distribute` (fully_shard or replicate) to each block of a model that has `blocks`, and then to the
    rest."""
    for block in blocks_of(net):
        distribute(block)
    distribute(net)


def on_host(states: Mapping[Any, Any], keep: bool) -> dict[Any, Any]:
    """Returns `states` with full tensors on the CPU if `keep`, else an empty dict. All ranks that have shards must call
    it."""

    def full(tensor: Tensor) -> Tensor | None:
        tensor = unsharded(tensor)
        return tensor.cpu() if keep else None

    unsharded_states = tree_map_only(Tensor, full, dict(states))
    return unsharded_states if keep else {}
