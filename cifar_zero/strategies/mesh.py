"""Base of the strategies that cut the model themselves: fsdp2, tensor_parallel and pipeline."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from cifar_zero.config.run import Run
from cifar_zero.optimizers.groups import keep_own_options
from cifar_zero.optimizers.options import Implementation
from cifar_zero.strategies import OwnStrategy
from cifar_zero.strategies.norm import clip_by_global_norm

Shard = Callable[[nn.Module, DeviceMesh], None]
"""Cuts the parameters of a whole model, the same on every rank, into this rank's shards."""


class MeshStrategy(OwnStrategy, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy, except that `shard` cuts the model and checkpoints are plain files.

    The module builds the whole model on each rank, with the same weights; `shard` cuts it just before the optimizer is
    made. For a checkpoint rank 0 gets each tensor whole, one at a time, so that no GPU ever holds the model.
    Lightning's own strategy (2.6.6) reads only what it wrote itself.

    Args:
        run: of this rank.
        shard: cuts the model.
        together: whether all ranks compute the same images together; otherwise each trains on different images.
        casts: whether `shard` also sets the precision, so that Lightning does not.
    """

    def __init__(self, run: Run, shard: Shard, *, together: bool, casts: bool = False):
        super().__init__(
            data_parallel_size=1 if together else run.world_size,
            tensor_parallel_size=run.world_size if together else 1,  # Lightning's only name for ranks of one model
            save_distributed_checkpoint=False,
            process_group_backend="gloo" if run.on_cpu else None,
        )
        self.casts = casts
        self._shard = shard
        self._sharded = False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether the trainer passes the optimizer's state of a checkpoint, which is read whole."""
        return True

    def optimizer_implementation(self, device_type: str) -> Implementation:
        """Returns torch's, not fused on a GPU either: `_fused_sgd_` does not accept a DTensor (torch 2.15)."""
        return "torch"

    def setup(self, trainer: Trainer) -> None:
        """Cuts the model, once for the fit and the test after it."""
        assert self.model is not None
        if not self._sharded:
            self._shard(self.model.net, self.device_mesh)  # pyright: ignore[reportArgumentType]
            self._sharded = True
        super().setup(trainer)
        self.precision_plugin.clip_grad_by_norm = clip_optimizer

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the whole weights, on rank 0; every rank takes part."""
        assert self.model is not None
        return self._whole(self.model.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's whole state in torch's form, on rank 0; every rank takes part."""
        state = unwrapped(optimizer).state_dict()
        return {**state, "state": {number: self._whole(entry) for number, entry in state["state"].items()}}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Returns a checkpoint of any strategy, on every rank."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Keeps this rank's shard of the whole weights."""
        assert self.lightning_module is not None
        own, whole = self.lightning_module.state_dict(), checkpoint["state_dict"]
        shards = {name: cut(whole[name], like) for name, like in own.items() if name in whole}
        self.lightning_module.load_state_dict(shards, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Keeps this rank's shard of the optimizer's whole state."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            whole = keep_own_options(optimizer, saved)
            parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
            state = {
                number: {key: cut(value, parameters[number]) for key, value in entry.items()}
                for number, entry in whole["state"].items()
            }
            optimizer.load_state_dict({**whole, "state": state})

    def _whole(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in tensors.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if self.is_global_zero:
                found |= on_host({name: whole})
        return found


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns torch's own optimizer without the wrapper of Lightning (2.6.6)."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same with tensors on the CPU."""
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}


def cut(whole: Any, like: Any) -> Any:
    """Returns this rank's shard of a whole tensor, cut as `like` is; a value of another shape (an optimizer's number of
    steps) as it is. Nothing is communicated."""
    if not isinstance(like, DTensor) or not isinstance(whole, Tensor) or whole.shape != like.shape:
        return whole
    whole = whole.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def clip_optimizer(optimizer: Optimizer, clip_val: float) -> None:
    """Clips an optimizer's gradients, if there is a limit, by the norm over all ranks' shards."""
    if clip_val > 0:
        clip_by_global_norm([parameter for group in optimizer.param_groups for parameter in group["params"]], clip_val)
