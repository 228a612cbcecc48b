"""Defines the adapters of plain PyTorch and of DistributedDataParallel."""

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
"""DDP's communication hooks that send the gradients themselves, each with the dtype in which it sends them, or None for
the gradient's own."""


def fused_scale(optimizer: Any) -> float:
    """Returns the loss scale by which the running step of a fused optimizer divides the gradients, or 1. A GradScaler
    leaves this to such an optimizer, unless the script has called `unscale_`."""
    return float(getattr(optimizer, "grad_scale", None) or 1.0)


def overflows(optimizer: Any) -> bool:
    """Returns whether the running step of a fused optimizer changes nothing, because a GradScaler has found that a
    gradient overflows."""
    return bool(getattr(optimizer, "found_inf", None) or 0.0)


class PlainAdapter(EngineAdapter):
    """Reads a training in a single process, without averaging of gradients."""

    def __init__(self, module: nn.Module, optimizer: Any):
        super().__init__(module, optimizer)
        if self.ranks.size > 1 and type(self) is PlainAdapter:
            raise NotAuditable("several ranks train without DDP or FSDP, so it is unknown which ranks average")
        # References to the gradients that the last backward pass has left, and their versions, by index.
        self.left: dict[int, tuple[Any, int]] = {}
        self.reshaped: set[int] = set()  # gradients that torch has clipped in a way that the audit does not repeat

    def attach(self, audit: Any) -> None:
        """Also makes each call of the optimizer's `step` end the audited step, and makes `watch` report to this
        adapter."""
        watch()
        super().attach(audit)
        self.audit = audit
        ends = self.optimizer.register_step_post_hook(
            Hook(lambda *_: audit.depth or audit.end_step(skipped=audit.judges_step and overflows(self.optimizer)))
        )
        WATCHED.add(self)
        audit.undo.callback(ends.remove)
        audit.undo.callback(WATCHED.discard, self)

    scaled_by: float | None = None
    """The loss scale by which a GradScaler has divided the gradients of this step, or None."""

    clipped_to: float | None = None
    """The norm to which torch.nn.utils.clip_grad_norm_ has clipped the gradients of this step, or None."""

    def begins_sum(self, index: int) -> bool:
        return self.parameters[index].grad is None

    def begin_backward(self) -> dict[int, Tensor]:
        gradients = ((index, self.parameters[index].grad) for index in self.trained)
        return {index: each for index, each in gradients if each is not None}

    def loss_scale(self) -> float:
        return self.scaled_by or 1.0

    def clip_limit(self) -> float:
        return self.clipped_to or 0.0

    def after_backward(self) -> None:
        self.scaled_by, self.clipped_to, self.reshaped = None, None, set()
        gradients = ((index, self.parameters[index].grad) for index in self.trained)
        self.left = {index: (weakref.ref(each), each._version) for index, each in gradients if each is not None}

    @contextmanager
    def changes_accepted(self) -> Iterator[None]:
        """Context manager in which torch may change gradients, without making them count as modified."""
        unmodified = self.left.keys() - self.modified_gradients()
        yield
        for index in unmodified:
            left, _ = self.left[index]
            if (gradient := left()) is not None:
                self.left[index] = left, gradient._version

    def modified_gradients(self) -> set[int]:
        modified = set(self.reshaped)  # whose versions may be the same, if they are DTensors
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
        # torch 2.15 has renamed broadcast_buffers.
        self.syncs_buffers = any(
            getattr(each, "forward_sync_buffers", getattr(each, "broadcast_buffers", False)) for each in wrappers
        )

    def begin_micro_batch(self) -> str | None:
        if any(wrapper._join_config.enable for wrapper in self.wrappers):
            return "ranks with fewer batches than others do not take part in a collective of the audit"
        return None

    @property
    def label(self) -> str:
        return f"DDP, {self.ranks}"

    def replica(self, index: int) -> tuple[int, int]:
        return self.ranks.rank, self.ranks.size

    def rounding_dtypes(self) -> set[torch.dtype]:
        return super().rounding_dtypes() | {dtype for hook in self.hooks if (dtype := SENT_IN[hook]) is not None}


WATCHED: weakref.WeakSet[PlainAdapter] = weakref.WeakSet()


def _watching(optimizer: Any) -> list[PlainAdapter]:
    return [adapter for adapter in WATCHED if adapter.optimizer is optimizer]


@cache
def watch() -> None:
    """Makes torch's functions that clip or unscale gradients report to the adapters in WATCHED. A second call does
    nothing."""
    for module in (nn.utils, nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
            if hasattr(module, name):
                wrap_function(module, name, _clip)
    wrap_function(torch.amp.GradScaler, "unscale_", _unscale)
    wrap_function(torch.amp.GradScaler, "step", _step)


def _clip(clip: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Clips gradients. If these are all gradients of an adapter and no others, clipped by their 2-norm for the first
    time in this step, the adapter keeps the limit, which the audit checks. If there are others among them, their common
    factor is not judged. In every other case, the adapter's gradients among them count as modified."""
    parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    given = {id(each) for each in parameters}
    arguments = inspect.signature(clip).bind(parameters, *args, **kwargs).arguments
    by_norm = clip.__name__ == "clip_grad_norm_" and arguments.get("norm_type", 2) == 2
    with ExitStack() as stack:
        for adapter in [*WATCHED]:
            clipped = {index for index in adapter.trained if id(adapter.parameters[index]) in given}
            if by_norm and clipped == adapter.trained and adapter.clipped_to is None:
                own = {id(adapter.parameters[index]) for index in clipped}
                if not any(each.grad is not None and id(each) not in own for each in parameters):
                    adapter.clipped_to = float(arguments["max_norm"])
                stack.enter_context(adapter.changes_accepted())
            else:
                adapter.reshaped |= clipped
        return clip(parameters, *args, **kwargs)


def _unscale(unscale: Any, scaler: Any, optimizer: Any) -> None:
    adapters = _watching(optimizer) if scaler.is_enabled() else []
    with ExitStack() as stack:
        for adapter in adapters:
            stack.enter_context(adapter.changes_accepted())
        unscale(scaler, optimizer)
    for adapter in adapters:
        adapter.scaled_by = scaler.get_scale()


def _step(step: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Ends the audited step also if the scaler does not call the optimizer, because a gradient overflowed."""
    audits = [(adapter.audit, adapter.audit.step) for adapter in _watching(optimizer)]
    result = step(scaler, optimizer, *args, **kwargs)
    for audit, before in audits:
        if audit.step == before:
            audit.end_step(skipped=True)
    return result
