"""What other packages read from a strategy: whole tensors, this rank's shards, norms, bytes; see `strategies.hooks_of`.

Only the strategies know how a parameter is sharded, and where its gradient and its optimizer's copy of it are.
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
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor, _foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from cifar_zero.optimizers import Implementation


@dataclass(frozen=True)
class Updated:
    """A tensor that an optimizer updates on this rank: a weight, a shard, or a flat part of several master weights."""

    target: Any
    parameters: Sequence[Any]  # of the module, in order
    cut: Callable[
        [Sequence[Tensor]], Tensor
    ]  # from unsharded tensors of the parameters this rank's part, no collective
    optimizer: Any
    group: dict[str, Any]  # the options of its step

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer's state of the tensor; empty before the first step."""
        return self.optimizer.state.get(self.target, {})

    def optimizer_of(self, twin: Parameter) -> Any:
        """Returns an optimizer that does with a copy of the tensor, and copies of its state, what this one does."""
        other = object.__new__(type(self.optimizer))  # copy.copy would drop attributes of its own (torch 2.15)
        vars(other).update(vars(self.optimizer))
        other.param_groups = [{**self.group, "params": [twin]}]
        other.state = defaultdict(dict)
        if self.state:
            other.state[twin] = copy.deepcopy({**self.state})
        return other


class Hooks:
    """The defaults, for a strategy whose parameters are plain tensors or DTensors and whose optimizer is torch's.

    A family of strategies has a subclass that overrides what differs. A parameter is one of the module that the
    strategy trains; a buffer may be given instead. "Collective" means that every rank must make the same call.
    """

    def __init__(self, strategy: Any = None):
        self.strategy = strategy

    def optimizer_implementation(self, device_type: str, clips: bool) -> Implementation:
        """Returns which implementation of an optimizer runs on devices of a type, cuda or cpu.

        torch's fused optimizer updates all parameters in one call. It is used on CUDA: on the CPU it rounds an element
        at the end of a tensor differently from one in its middle (torch 2.15), so that sharding would change the
        weights. Under autocast it is used only without a gradient scaler and without clipping (`clips`): Lightning
        (2.6.6) does not clip the gradients of a fused optimizer there, in bfloat16 either.
        """
        precision = self.strategy.precision_plugin
        refused = isinstance(precision, MixedPrecision) and (clips or precision.scaler is not None)
        return "torch_fused" if device_type == "cuda" and not refused else "torch"

    def parameter_groups(self, module: Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns an optimizer's parameter groups, split further where the strategy must tell parameters apart."""
        return groups

    def replica(self) -> tuple[int, int]:
        """Returns the number of replicas that train on different images, and the number of this rank's replica. To be
        called after the rendezvous of the ranks."""
        if not isinstance(self.strategy, ParallelStrategy):
            return 1, 0
        sampler = self.strategy.distributed_sampler_kwargs
        return sampler["num_replicas"], sampler["rank"]

    def data_group(self) -> dist.ProcessGroup | None:
        """Returns the ranks, one of each replica, that with this one see each image once; None for all ranks."""
        mesh = self.strategy.device_mesh if isinstance(self.strategy, ModelParallelStrategy) else None
        return None if mesh is None else mesh["data_parallel"].get_group()

    def plain_names(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the plain model's name for each name of a weight of this rank; `names` are all of them."""
        return {name: name for name in names}

    def by_plain_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors of this rank's weights by the plain model's names, and those of the weights that only other
        ranks have. Collective."""
        return dict(tensors)

    def weights(self, module: Module) -> dict[str, Tensor]:
        """Returns `full` of all parameters of a module, on the CPU, by the plain model's names. Collective."""
        return self.by_plain_name({name: self.full(each).cpu() for name, each in module.named_parameters()})

    def gradients(self, module: Module) -> dict[str, Tensor]:
        """Returns `full_gradient` of all trained parameters, on the CPU, by the plain model's names. Collective."""
        trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        return self.by_plain_name({name: self.full_gradient(each).cpu() for name, each in trained})

    def shape(self, parameter: Any) -> torch.Size:
        """Returns the unsharded shape, without communication."""
        return parameter.shape

    def full(self, parameter: Any) -> Tensor:
        """Returns a float32 copy of the unsharded parameter: what a plain module holds at this step.

        It has the values that the optimizer updates: under mixed precision of every strategy the float32 master weight,
        which autocast keeps in the module and an engine next to it. A frozen parameter has no master weight: the
        module's own is converted. An expert is this rank's. Collective; to be called during a fit.
        """
        return _unsharded(parameter).to(torch.float32, copy=True)

    def full_gradient(self, parameter: Any) -> Tensor:
        """Returns a float32 copy of the unsharded gradient; zeros if the step computed none.

        The gradient is summed over micro-batches, averaged over ranks, divided by the loss scale and not yet clipped.
        An expert is this rank's. Collective; to be called in `on_before_optimizer_step` when `ends_step`.
        """
        if parameter.grad is None:
            return torch.zeros(self.shape(parameter), device=parameter.device)
        return _unsharded(parameter.grad).to(torch.float32, copy=True)

    def write(self, parameter: Any, value: Tensor) -> None:
        """Overwrites a parameter with an unsharded value, the same on every rank. Collective; to be called before the
        optimizer is made, which may keep a copy."""
        with torch.no_grad():
            parameter.copy_(cut(value, parameter))

    def local(self, parameter: Any) -> Tensor:
        """Returns the tensor that this rank holds, not a copy: the parameter itself, or its shard."""
        return local_of(parameter)

    def cut(self, whole: Tensor, parameter: Any) -> Tensor:
        """Returns this rank's shard of an unsharded tensor, without communication."""
        return local_of(cut(whole, parameter))

    def compute_dtype(self, parameter: Any) -> torch.dtype:
        """Returns the type in which the forward pass uses a parameter, but for autocast."""
        return parameter.dtype

    def held(self, parameter: Any, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor with which this rank computes, and what it must be if the parameter is `whole`."""
        local = self.local(parameter).detach()
        yield local, self.cut(whole, parameter).to(local.dtype)

    def updated(self, optimizer: Any, at_any_step: bool = False) -> Iterator[Updated]:
        """Yields what this rank's optimizer updates in the step that comes next, or all that it updates
        `at_any_step`; nothing if that is out of reach."""
        own = getattr(optimizer, "optimizer", optimizer)  # Lightning's wrapper
        for group in own.param_groups:
            for parameter in group["params"]:
                if at_any_step or parameter.grad is not None:
                    yield Updated(parameter, [parameter], partial(self._cut_one, parameter), own, group)

    def _cut_one(self, parameter: Any, wholes: Sequence[Tensor]) -> Tensor:
        return cut(wholes[0], parameter)

    def rewriting(self) -> AbstractContextManager[None]:
        """Returns a context in which `local` may be overwritten in place during a fit; all ranks enter it."""
        return nullcontext()

    def starts_step(self, batch_idx: int, accumulate: int) -> bool:
        """Returns whether the micro-batch is the first of a step; asked before its forward pass."""
        return batch_idx % accumulate == 0

    def clip_limit(self, trainer: Any) -> float:
        """Returns the norm to which the gradient is clipped; 0: it is not."""
        return trainer.gradient_clip_val or 0.0

    def ends_step(self) -> bool:
        """Returns whether the micro-batch is at an accumulation boundary; asked in `on_before_optimizer_step`."""
        return True

    def ranks_of(self, parameter: Any) -> int:
        """Returns how many ranks divide a gradient, or the layers that it belongs to; 1 if all ranks have the same."""
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            return 1
        sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
        return math.prod(size for size, placement in sizes if not placement.is_replicate())

    def gradient_norm(self, parameters: Iterable[Any]) -> Tensor | None:
        """Returns the global L2 norm of the gradients before clipping, a float32 scalar on the rank's device, equal on
        all ranks; None where only the step computes it. Collective; to be called in `on_before_optimizer_step`."""
        return self.norm(parameters)

    def norm(self, parameters: Iterable[Any]) -> Tensor:
        """Returns the L2 norm of all gradients as they are, float32, each shard and each expert once. Collective."""
        total, divided = torch.zeros((), device=self.strategy.root_device), False
        for parameter in parameters:
            ranks = self.ranks_of(parameter)
            divided = divided or ranks > 1
            if parameter.grad is not None:
                # torch's get_total_norm would round the norm of each gradient to the gradient's type.
                total += ranks * torch.linalg.vector_norm(local_of(parameter.grad), dtype=torch.float32).square()
        if divided:  # the world / ranks copies of each part are all added up
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return total.sqrt()

    def clip(self, parameters: Iterable[Any], limit: float) -> None:
        """Clips gradients by `norm`; collective. torch's clip_grad_norm_ (2.15) takes no DTensors of several meshes."""
        given = [*parameters]
        gradients = [local_of(parameter.grad) for parameter in given if parameter.grad is not None]
        scale = (limit / (self.norm(given) + 1e-6)).clamp(max=1)
        if gradients:
            _foreach_mul_(gradients, scale)

    def step_gradient_norm(self) -> float | None:
        """Returns the norm that the last step computed itself; None if `gradient_norm` returns it before the step."""
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

        Memory that several tensors share counts once, and padding counts; communication buffers, activations and what
        is on disk do not. Float32 master weights are optimizer state. To be called while gradients exist.
        """
        parameters = [*module.parameters()]
        return count_bytes(parameters, [parameter.grad for parameter in parameters], optimizer.state)

    def engine_config(self) -> dict[str, Any]:
        """Returns the complete configuration of DeepSpeed's engine, by DeepSpeed's names; empty without an engine."""
        return {}

    def free(self) -> None:
        """Frees what would outlive the fit, before another one in the same process."""


def cut(whole: Any, like: Any) -> Any:
    """Returns this rank's shard of a whole tensor, cut as `like` is; a value of another shape (an optimizer's number of
    steps) as it is. Nothing is communicated."""
    if not like.numel():  # a block of another rank of the pipeline
        return like
    if not isinstance(like, DTensor) or not isinstance(whole, Tensor) or whole.shape != like.shape:
        return whole
    whole = whole.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def count_bytes(parameters: Any, gradients: Any, state: Any) -> tuple[int, int, int]:
    """Returns the bytes of the tensors in three nested containers; memory that they share counts in the first only."""
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


def _unsharded(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def local_of(tensor: Any) -> Any:
    """Returns this rank's shard of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
