"""Defines the adapters of plain PyTorch and of DistributedDataParallel."""

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from stepcheck.engines.adapter import EngineAdapter, Hook, NotAuditable
from stepcheck.patch import wrap_function

SENT_IN = {allreduce_hook: None, bf16_compress_hook: torch.bfloat16, fp16_compress_hook: torch.float16}
"""The dtype in which DDP's communication hooks send gradients; None for the gradient's own."""


class PlainAdapter(EngineAdapter):
    """Reads a training in a single process, without averaging of gradients."""

    def __init__(self, module: nn.Module, optimizer: Any):
        super().__init__(module, optimizer)
        if self.ranks.size > 1 and type(self) is PlainAdapter:
            raise NotAuditable("several ranks train without DDP or FSDP, so it is unknown which ranks average")

    def attach(self, audit: Any) -> list[Callable[[], None]]:
        """Also ends the audited step after each call of the optimizer's step, and receives the reports of torch's
        functions that clip or unscale gradients (see `watch`)."""
        watch()
        handles = super().attach(audit)
        ends = self.optimizer.register_step_post_hook(Hook(lambda *_: audit.depth or audit.end_step()))
        # References to the gradients that the last backward pass has left, and their versions, by index.
        self.left: dict[int, tuple[Any, int]] = {}
        self.reshaped: set[int] = set()  # gradients that torch has clipped in a way that the audit does not repeat
        WATCHED[id(self.optimizer)] = self
        return [*handles, ends.remove, self._unregister]

    def _unregister(self) -> None:
        WATCHED.pop(id(self.optimizer), None)

    scaled_by: float | None = None
    """The factor of a GradScaler that has divided the gradients by it."""

    clipped_to: float | None = None
    """The norm to which torch.nn.utils.clip_grad_norm_ has clipped gradients of this step."""

    def is_first_gradient(self, index: int) -> bool:
        return self.parameters[index].grad is None

    def accumulated(self, index: int) -> Tensor | None:
        return self.parameters[index].grad

    def loss_scale(self) -> float:
        fused = getattr(self.optimizer, "grad_scale", None) is not None  # the optimizer divides by the scale itself
        return self.scaled_by if self.scaled_by and not fused else 1.0

    def clip_limit(self) -> float:
        return self.clipped_to or 0.0

    def after_backward(self) -> None:
        self.scaled_by, self.clipped_to, self.reshaped = None, None, set()
        gradients = ((index, self.parameters[index].grad) for index in self.trained)
        self.left = {index: (weakref.ref(each), each._version) for index, each in gradients if each is not None}

    def accept_gradients(self) -> None:
        """Records that torch has clipped or unscaled the gradients, so that they do not count as modified."""
        for index, (left, _) in self.left.items():
            if left() is not None:
                self.left[index] = left, left()._version

    def modified_gradients(self) -> set[int]:
        modified = set(self.reshaped)
        for index in self.trained:
            parameter, (left, version) = self.parameters[index], self.left.get(index, (None, 0))
            if parameter.grad is None:
                continue
            if (
                left is None
                or left() is not parameter.grad
                or version != parameter.grad._version
                or parameter._post_accumulate_grad_hooks
            ):
                modified.add(index)
        return modified


class DDPAdapter(PlainAdapter):
    """Reads a training under DistributedDataParallel, where each rank has the mean of all ranks' gradients."""

    def __init__(self, module: nn.Module, optimizer: Any, wrappers: Sequence[DistributedDataParallel]):
        super().__init__(module, optimizer)
        self.hooks = [hook for wrapper in wrappers for hook, _ in getattr(wrapper, "_comm_hooks", [])]
        self.wrappers = wrappers
        if any(dist.get_world_size(wrapper.process_group) != self.ranks.size for wrapper in wrappers):
            raise NotAuditable("DDP averages the gradients of a group of ranks only")
        unknown = [hook.__name__ for hook in self.hooks if hook not in SENT_IN]
        if unknown:
            raise NotAuditable(f"DDP's communication hook {unknown[0]} may send other values than the gradients")

    def begin_micro_batch(self) -> str | None:
        if any(wrapper._join_config.enable for wrapper in self.wrappers):
            return "ranks with fewer batches than others do not take part in a collective of the audit"
        return None

    @property
    def label(self) -> str:
        return f"DDP, {self.ranks}"

    @property
    def syncs_buffers(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # torch 2.15 has renamed broadcast_buffers.
        options = (
            getattr(each, "forward_sync_buffers", getattr(each, "broadcast_buffers", False)) for each in self.wrappers
        )
        return any(options)

    def gradient_replicas(self, index: int) -> int:
        return self.ranks.size

    def weight_replicas(self, index: int) -> int:
        return self.ranks.size

    def rounding_dtypes(self) -> set[torch.dtype]:
        return super().rounding_dtypes() | {dtype for hook in self.hooks if (dtype := SENT_IN[hook]) is not None}


WATCHED: MutableMapping[int, PlainAdapter] = weakref.WeakValueDictionary()
"""The adapters of audited optimizers, by the optimizer's id."""


@cache
def watch() -> None:
    """Makes torch's functions that clip or unscale gradients report to the adapters. A second call does nothing."""
    utils: Any = nn.utils
    for module in (utils, utils.clip_grad):
        wrap_function(module, "clip_grad_norm_", _clip_grad_norm)
    for module, name in (
        (utils, "clip_grad_value_"),
        (utils.clip_grad, "clip_grad_value_"),
        (utils, "clip_grads_with_norm_"),
    ):
        if hasattr(module, name):
            wrap_function(module, name, _clip_otherwise)
    wrap_function(torch.amp.GradScaler, "unscale_", _unscale)
    wrap_function(torch.amp.GradScaler, "step", _scaler_step)


def _clip_grad_norm(
    clip: Any, parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any
) -> Any:
    parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    adapters = [*_adapters_of(parameters)]
    for adapter, clipped in adapters:
        if norm_type == 2 and clipped == adapter.trained and adapter.clipped_to is None:
            adapter.clipped_to = float(max_norm)
        else:
            adapter.reshaped |= clipped
    result = clip(parameters, max_norm, norm_type, *args, **kwargs)
    for adapter, _ in adapters:
        adapter.accept_gradients()
    return result


def _clip_otherwise(clip: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    for adapter, clipped in _adapters_of(parameters):
        adapter.reshaped |= clipped
    return clip(parameters, *args, **kwargs)


def _unscale(unscale: Any, scaler: Any, optimizer: Any) -> None:
    unscale(scaler, optimizer)
    if id(optimizer) in WATCHED and scaler.is_enabled():
        WATCHED[id(optimizer)].scaled_by = scaler.get_scale()
        WATCHED[id(optimizer)].accept_gradients()


def _scaler_step(step: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if id(optimizer) in WATCHED and scaler.is_enabled():
        WATCHED[id(optimizer)].scaled_by = scaler.get_scale()
    return step(scaler, optimizer, *args, **kwargs)


def _adapters_of(parameters: list[Any]) -> Iterator[tuple[PlainAdapter, set[int]]]:
    """Yields each adapter that trains some of the given parameters, with the indices of these parameters."""
    given = {id(each) for each in parameters}
    for adapter in [*WATCHED.values()]:
        own = {index for index in adapter.trained if id(adapter.parameters[index]) in given}
        if own:
            yield adapter, own
