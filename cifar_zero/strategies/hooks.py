"""Defines what other packages read from a strategy: unsharded tensors, this rank's shards, norms and sizes in bytes.
`strategies.hooks_of` returns the hooks of a strategy."""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, _foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from cifar_zero.optimizers import Implementation


class Hooks:
    """The default hooks, for plain tensors or DTensors as parameters and an optimizer of torch. Parameters that are
    passed in belong to the module that the strategy trains, or are buffers of it. "Collective" means that every rank
    must make the same call."""

    def __init__(self, strategy: Any = None):
        self.strategy = strategy

    def optimizer_implementation(self, device_type: str, clips: bool = False) -> Implementation:
        """Returns which implementation of an optimizer to use on a device type, cuda or cpu: torch's fused one on CUDA,
        else torch's plain one.

        On the CPU the fused one rounds an element at the end of a tensor differently from one in the middle (torch
        2.15), so that sharding would change the weights. Under autocast it is used only without a gradient scaler and
        without clipping (`clips`), because Lightning (2.6.6) does not clip the gradients of a fused optimizer under
        autocast, not even in bfloat16.
        """
        precision = self.strategy.precision_plugin
        refused = isinstance(precision, MixedPrecision) and (clips or precision.scaler is not None)
        return "torch_fused" if device_type == "cuda" and not refused else "torch"

    def split_groups(self, module: Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the given parameter groups of an optimizer, split further if the strategy needs some parameters of
        `module` in separate groups."""
        return groups

    def replica(self) -> tuple[int, int]:
        """Returns the number of replicas that train on different images, and the index of this rank's replica. Call it
        after the rendezvous of the ranks."""
        if not isinstance(self.strategy, ParallelStrategy):
            return 1, 0
        sampler = self.strategy.distributed_sampler_kwargs
        return sampler["num_replicas"], sampler["rank"]

    def data_group(self) -> dist.ProcessGroup | None:
        """Returns the process group of this rank and one rank of each other replica, which together see each image
        once. None stands for all ranks."""
        return None

    def plain_names(self, names: Iterable[str]) -> dict[str, str]:
        """Maps the name of each weight on this rank to its name in the plain model. `names` must contain all weights of
        the rank."""
        return {name: name for name in names}

    def by_plain_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's tensors together with those of weights that only other ranks have. `tensors` is keyed by
        the names on this rank, and the result by the names in the plain model. Collective."""
        return dict(tensors)

    def gradients(self, module: Module) -> dict[str, Tensor]:
        """Returns the `full_gradient` of each trained parameter on the CPU, keyed by the names in the plain model, with
        experts that only other ranks have. Collective."""
        gradients: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                gradients[name] = self.full_gradient(parameter).cpu()
        return self.by_plain_name(gradients)

    def shape(self, parameter: Any) -> torch.Size:
        """Returns the unsharded shape of a parameter, without communication."""
        return parameter.shape

    def full_gradient(self, parameter: Any) -> Tensor:
        """Returns a float32 copy of the unsharded gradient, or zeros if the step computed none. It is summed over
        micro-batches, averaged over ranks, divided by the loss scale and not yet clipped. For a parameter of an expert,
        it is the gradient of this rank's own expert. Collective; call it only in `on_before_optimizer_step` when
        `ends_step` returns true."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return unsharded(gradient).to(torch.float32, copy=True)

    def write(self, parameter: Any, value: Tensor) -> None:
        """Overwrites a parameter with an unsharded value, the same on every rank. Collective. Call it before the
        optimizer is made, because the optimizer may keep a copy."""
        with torch.no_grad():
            parameter.copy_(shard_like(value, parameter))

    def local(self, parameter: Any) -> Tensor:
        """Returns the tensor that this rank holds, which is the parameter itself or its shard, without a copy."""
        return local_of(parameter)

    def shard(self, full: Tensor, parameter: Any) -> Tensor:
        """Returns this rank's shard of an unsharded tensor, sharded like `parameter`, or the tensor itself if the
        parameter is not sharded. Nothing is communicated."""
        return local_of(shard_like(full, parameter))

    def compute_dtype(self, parameter: Any) -> torch.dtype:
        """Returns the dtype in which the forward pass uses a parameter, regardless of autocast."""
        return parameter.dtype

    def rewriting(self) -> AbstractContextManager[None]:
        """Returns a context in which the tensors of `local` may be overwritten in place during a fit. Collective."""
        return nullcontext()

    def ends_step(self) -> bool:
        """Returns whether the micro-batch is at an accumulation boundary. Call it in `on_before_optimizer_step`."""
        return True

    def ranks_of(self, parameter: Any) -> int:
        """Returns over how many ranks the gradient of a parameter is sharded or, if ranks hold different layers
        (experts, pipeline blocks), over how many ranks these layers are distributed. Returns 1 if all ranks have the
        same full gradient."""
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            return 1
        sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
        return math.prod(size for size, placement in sizes if not placement.is_replicate())

    def gradient_norm(self, parameters: Iterable[Any]) -> Tensor | None:
        """Returns the L2 norm of all gradients before clipping, a float32 scalar that is equal on all ranks, or None if
        only the step computes the norm. Collective; call it only in `on_before_optimizer_step`."""
        return self.norm(parameters)

    def norm(self, parameters: Iterable[Any]) -> Tensor:
        """Returns the L2 norm of all gradients as they are stored, a float32 scalar. Each shard and each expert counts
        once. Collective."""
        total, divided = torch.zeros((), device=self.strategy.root_device), False
        for parameter in parameters:
            ranks = self.ranks_of(parameter)
            divided = divided or ranks > 1
            if parameter.grad is not None:
                # torch's get_total_norm would round the norm of each gradient to the gradient's dtype.
                total += ranks * torch.linalg.vector_norm(local_of(parameter.grad), dtype=torch.float32).square()
        if divided:  # each part is added by world_size / ranks ranks, each time multiplied by ranks
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return total.sqrt()

    def clip(self, parameters: Iterable[Any], limit: float) -> None:
        """Scales gradients in place so that `norm` is at most `limit`. Collective. torch's clip_grad_norm_ (2.15) does
        not accept DTensors of several meshes."""
        given = [*parameters]
        gradients = [local_of(parameter.grad) for parameter in given if parameter.grad is not None]
        scale = (limit / (self.norm(given) + 1e-6)).clamp(max=1)
        if gradients:
            _foreach_mul_(gradients, scale)

    def step_gradient_norm(self) -> float | None:
        """Returns the gradient norm that the strategy computed in its last step, or None if steps compute no norm. In
        that case, `gradient_norm` returns it before the step."""
        return None

    def loss_scale(self) -> float | None:
        """Returns the dynamic loss scale of float16, else None."""
        scaler = getattr(self.strategy.precision_plugin, "scaler", None)
        return None if scaler is None else scaler.get_scale()

    def skipped_steps(self) -> int:
        """Returns the number of steps that an engine skipped because a gradient overflowed in float16."""
        return 0

    def state_bytes(self, module: Module, optimizer: Any) -> tuple[int, int, int]:
        """Returns the bytes of parameters, gradients and optimizer state of this rank, on its device and in host memory
        together. Shared memory is counted once. Padding is counted, but communication buffers, activations and tensors
        on disk are not. Float32 master weights count as optimizer state. Call it while gradients exist."""
        parameters = [*module.parameters()]
        return count_bytes(parameters, [parameter.grad for parameter in parameters], optimizer.state)

    def engine_config(self) -> dict[str, Any]:
        """Returns the configuration of DeepSpeed's engine, or an empty dict without an engine."""
        return {}


def shard_like(full: Any, like: Any) -> Any:
    """Returns this rank's shard of an unsharded tensor, sharded like `like`, without communication. If `like` is not
    sharded, or if the value has another shape, such as an optimizer's step count, the value itself is returned. If
    `like` is empty, because another rank of the pipeline has it, `like` itself is returned."""
    if not like.numel():  # in a block of another rank of the pipeline
        return like
    if not isinstance(like, DTensor) or not isinstance(full, Tensor) or full.shape != like.shape:
        return full
    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def count_bytes(parameters: Any, gradients: Any, state: Any) -> tuple[int, int, int]:
    """Returns the bytes of the tensors in three nested containers. Shared memory counts only in the first one that uses
    it."""
    counted: set[tuple[torch.device, int]] = set()

    def count(container: Any) -> int:
        total = 0
        for tensor in tensors_in(container):
            storage = local_of(tensor).untyped_storage()
            key = storage.device, storage.data_ptr()
            total += 0 if key in counted else storage.nbytes()
            counted.add(key)
        return total

    return count(parameters), count(gradients), count(state)


def tensors_in(container: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(container) if isinstance(leaf, Tensor)]


def unsharded(tensor: Tensor) -> Tensor:
    """Returns the full tensor of a DTensor, or any other tensor as it is. The result is detached from the graph.
    Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def local_of(tensor: Any) -> Any:
    """Returns this rank's shard of a DTensor, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
