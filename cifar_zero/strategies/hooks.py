"""Defines what other packages read from a strategy: unsharded tensors, this rank's shards, norms and sizes in bytes.
`strategies.hooks_of` returns the hooks of a strategy.

How a parameter is sharded, and where its gradient and the optimizer's copy of it are stored, depends on the strategy.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, _foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from cifar_zero.optimizers import Implementation


@dataclass(frozen=True)
class Updated:
    """A tensor that an optimizer updates on this rank: a weight, a shard, or a flat part of several master weights."""

    target: Any
    parameters: Sequence[Any]  # the module's parameters that the tensor covers, in order
    # Returns this rank's part, given the unsharded tensors of the parameters. Nothing is communicated.
    cut: Callable[[Sequence[Tensor]], Tensor]
    optimizer: Any
    group: dict[str, Any]  # the options with which the step updates the tensor

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer's state of the tensor, which is empty before the first step."""
        return self.optimizer.state.get(self.target, {})

    def optimizer_of(self, twin: Parameter) -> Any:
        """Returns a new optimizer that updates `twin`, a copy of `target`, exactly as the original optimizer updates
        `target`. The new optimizer has a copy of the original optimizer's state of `target`."""
        other = object.__new__(type(self.optimizer))  # copy.copy would drop attributes of subclasses (torch 2.15)
        vars(other).update(vars(self.optimizer))
        other.param_groups = [{**self.group, "params": [twin]}]
        other.state = defaultdict(dict)
        if self.state:
            other.state[twin] = copy.deepcopy({**self.state})
        return other


class Hooks:
    """The default hooks, for a strategy that uses plain tensors or DTensors as parameters and an optimizer of torch.

    Each family of strategies has a subclass that overrides what differs. Every parameter that is passed in belongs to
    the module that the strategy trains; a buffer of this module may be passed instead. "Collective" means that every
    rank must make the same call.
    """

    def __init__(self, strategy: Any = None):
        self.strategy = strategy

    def optimizer_implementation(self, device_type: str, clips: bool = False) -> Implementation:
        """Returns which implementation of an optimizer to use on a device type, cuda or cpu.

        torch's fused optimizer updates all parameters in one call and is used on CUDA. It is not used on the CPU, where
        it rounds an element at the end of a tensor differently from one in the middle (torch 2.15), so that sharding
        would change the weights. Under autocast it is used only without a gradient scaler and without clipping
        (`clips`), because Lightning (2.6.6) does not clip the gradients of a fused optimizer under autocast, not even
        in bfloat16.
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
        """Returns the process group that contains this rank and one rank of each other replica. Together these ranks
        see each image once. None stands for all ranks."""
        return None

    def plain_names(self, names: Iterable[str]) -> dict[str, str]:
        """Maps the name of each weight on this rank to its name in the plain model. `names` must contain all weights of
        the rank."""
        return {name: name for name in names}

    def by_plain_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's tensors together with the tensors of weights that only other ranks have. The keys of the
        result are the names in the plain model, and the keys of `tensors` are the names on this rank. Collective."""
        return dict(tensors)

    def weights(self, module: Module) -> dict[str, Tensor]:
        """Returns `full` for every parameter of a module, on the CPU, keyed by the names in the plain model.
        Collective."""
        return self.by_plain_name({name: self.full(each).cpu() for name, each in module.named_parameters()})

    def gradients(self, module: Module) -> dict[str, Tensor]:
        """Returns `full_gradient` for every parameter of a module that is trained, on the CPU, keyed by the names in
        the plain model. Collective."""
        gradients: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                gradients[name] = self.full_gradient(parameter).cpu()
        return self.by_plain_name(gradients)

    def shape(self, parameter: Any) -> torch.Size:
        """Returns the unsharded shape of a parameter, without communication."""
        return parameter.shape

    def full(self, parameter: Any) -> Tensor:
        """Returns a float32 copy of the unsharded parameter, with the values that a plain module would hold at this
        step.

        These are the values that the optimizer updates. Under mixed precision they are the float32 master weight, which
        is the module's own parameter under autocast and a separate tensor under an engine. A frozen parameter has no
        master weight, so the module's parameter is converted. If the parameter belongs to an expert, the copy is of
        this rank's expert. Collective; call it only during a fit.
        """
        return unsharded(parameter).to(torch.float32, copy=True)

    def full_gradient(self, parameter: Any) -> Tensor:
        """Returns a float32 copy of the unsharded gradient, or zeros if the step computed none.

        The gradient is summed over micro-batches, averaged over ranks, divided by the loss scale and not yet clipped.
        For a parameter of an expert, it is the gradient of this rank's own expert. Collective; call it only in
        `on_before_optimizer_step` when `ends_step` returns true.
        """
        if parameter.grad is None:
            return torch.zeros(self.shape(parameter), device=parameter.device)
        return unsharded(parameter.grad).to(torch.float32, copy=True)

    def write(self, parameter: Any, value: Tensor) -> None:
        """Overwrites a parameter with an unsharded value, which must be the same on every rank. Collective. Call it
        before the optimizer is made, because the optimizer may keep a copy."""
        with torch.no_grad():
            parameter.copy_(cut(value, parameter))

    def local(self, parameter: Any) -> Tensor:
        """Returns the tensor that this rank holds, which is the parameter itself or its shard. It is not copied."""
        return local_of(parameter)

    def cut(self, whole: Tensor, parameter: Any) -> Tensor:
        """Returns this rank's shard of an unsharded tensor, without communication."""
        return local_of(cut(whole, parameter))

    def compute_dtype(self, parameter: Any) -> torch.dtype:
        """Returns the dtype in which the forward pass uses a parameter, regardless of autocast."""
        return parameter.dtype

    def held(self, parameter: Any, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor that this rank stores of a parameter and computes with. Yields with it the value that the
        tensor must have if the unsharded parameter is `whole`."""
        local = self.local(parameter).detach()
        yield local, self.cut(whole, parameter).to(local.dtype)

    def updated(self, optimizer: Any, at_any_step: bool = False) -> Iterator[Updated]:
        """Yields the tensors that this rank's optimizer updates in the coming step. With `at_any_step`, yields all
        tensors that the optimizer ever updates. Yields nothing if the tensors cannot be read, as on NVMe."""
        own = getattr(optimizer, "optimizer", optimizer)  # removes Lightning's wrapper
        for group in own.param_groups:
            for parameter in group["params"]:
                if at_any_step or parameter.grad is not None:
                    yield Updated(parameter, [parameter], partial(self._cut_one, parameter), own, group)

    def _cut_one(self, parameter: Any, wholes: Sequence[Tensor]) -> Tensor:
        return cut(wholes[0], parameter)

    def rewriting(self) -> AbstractContextManager[None]:
        """Returns a context in which the tensors of `local` may be overwritten in place during a fit. All ranks must
        enter it."""
        return nullcontext()

    def starts_step(self, batch_idx: int, accumulate: int) -> bool:
        """Returns whether the micro-batch is the first of a step. Must be called before the forward pass."""
        return batch_idx % accumulate == 0

    def clip_limit(self, trainer: Any) -> float:
        """Returns the norm to which the gradient is clipped, or 0 if it is not clipped."""
        return trainer.gradient_clip_val or 0.0

    def ends_step(self) -> bool:
        """Returns whether the micro-batch is at an accumulation boundary. Must be called in
        `on_before_optimizer_step`."""
        return True

    def ranks_of(self, parameter: Any) -> int:
        """Returns the number of ranks over which the gradient of a parameter is sharded. If whole layers are
        distributed over ranks instead, returns the number of these ranks for a parameter of these layers. The number is
        1 if all ranks have the same gradient."""
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            return 1
        sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
        return math.prod(size for size, placement in sizes if not placement.is_replicate())

    def gradient_norm(self, parameters: Iterable[Any]) -> Tensor | None:
        """Returns the global L2 norm of the gradients before clipping, as a float32 scalar on the rank's device that is
        equal on all ranks. Returns None if only the step computes the norm. Collective; call it only in
        `on_before_optimizer_step`."""
        return self.norm(parameters)

    def norm(self, parameters: Iterable[Any]) -> Tensor:
        """Returns the L2 norm of all gradients as they are stored, in float32. Each shard and each expert counts once.
        Collective."""
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
        """Clips gradients so that `norm` is at most `limit`. Collective. torch's clip_grad_norm_ (2.15) does not accept
        DTensors of several meshes."""
        given = [*parameters]
        gradients = [local_of(parameter.grad) for parameter in given if parameter.grad is not None]
        scale = (limit / (self.norm(given) + 1e-6)).clamp(max=1)
        if gradients:
            _foreach_mul_(gradients, scale)

    def step_gradient_norm(self) -> float | None:
        """Returns the gradient norm that the strategy computed in its last step. Returns None if the strategy computes
        no norm in a step. In this case `gradient_norm`, which is called before the step, returns the norm."""
        return None

    def loss_scale(self) -> float | None:
        """Returns the dynamic loss scale of float16, else None."""
        scaler = getattr(self.strategy.precision_plugin, "scaler", None)
        return None if scaler is None else scaler.get_scale()

    def skipped_steps(self) -> int:
        """Returns the number of steps that an engine skipped because a gradient overflowed in float16."""
        return 0

    def state_bytes(self, module: Module, optimizer: Any) -> tuple[int, int, int]:
        """Returns the bytes of parameters, gradients and optimizer state of this rank, on its device or in host memory.

        Memory that several tensors share is counted once. Padding is counted, but communication buffers, activations
        and tensors on disk are not. Float32 master weights count as optimizer state. Call it while gradients exist.
        """
        parameters = [*module.parameters()]
        return count_bytes(parameters, [parameter.grad for parameter in parameters], optimizer.state)

    def engine_config(self) -> dict[str, Any]:
        """Returns the complete configuration of DeepSpeed's engine, keyed by DeepSpeed's option names. The dict is
        empty if the strategy has no engine."""
        return {}

    def free(self) -> None:
        """Frees memory that would outlive the fit. Must be called before another fit in the same process."""


def cut(whole: Any, like: Any) -> Any:
    """Returns this rank's shard of a whole tensor, sharded like `like`. A value of another shape, such as an
    optimizer's step count, is returned unchanged. Nothing is communicated."""
    if not like.numel():  # in a block that another rank of the pipeline holds
        return like
    if not isinstance(like, DTensor) or not isinstance(whole, Tensor) or whole.shape != like.shape:
        return whole
    whole = whole.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def count_bytes(parameters: Any, gradients: Any, state: Any) -> tuple[int, int, int]:
    """Returns the bytes of the tensors in each of three nested containers. Shared memory counts only in the first
    container that uses it."""
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
    """Returns the tensors in nested lists and dictionaries."""
    return [leaf for leaf in tree_leaves(container) if isinstance(leaf, Tensor)]


def unsharded(tensor: Tensor) -> Tensor:
    """Returns the whole tensor of a DTensor, or any other tensor as it is. The result is detached from the graph.
    Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def local_of(tensor: Any) -> Any:
    """Returns this rank's shard of a DTensor, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
