"""Defines the adapters of plain PyTorch and of DistributedDataParallel."""

import inspect
import weakref
from collections.abc import Collection, Iterator, Sequence
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

from stepcheck.engines.adapter import EngineAdapter, Hook, NotAuditable, records_cuda_graph, running_steps
from stepcheck.patch import wrap_function

SENT_IN = {allreduce_hook: None, bf16_compress_hook: torch.bfloat16, fp16_compress_hook: torch.float16}
"""DDP's communication hooks that send the gradients themselves, each with the dtype in which it sends them, or None for
the gradient's own."""


def fused_scale(optimizer: Any) -> float:
    """Returns the loss scale by which the running step of a fused optimizer divides the gradients, or 1. A GradScaler
    leaves this to such an optimizer, unless the script has called `unscale_`. May wait for the device."""
    return float(getattr(optimizer, "grad_scale", None) or 1.0)


def overflows(optimizer: Any) -> bool:
    """Returns whether the running step of a fused optimizer changes nothing, because a GradScaler has found that a
    gradient overflows. May wait for the device."""
    return bool(getattr(optimizer, "found_inf", None) or 0.0)


class PlainAdapter(EngineAdapter):
    """Reads a training in a single process, without averaging of gradients."""

    def __init__(self, module: nn.Module, optimizer: Any):
        super().__init__(module, optimizer)
        if self.ranks.size > 1 and type(self) is PlainAdapter:
            raise NotAuditable("several ranks train without DDP or FSDP, so it is unknown which ranks average")
        # References to the gradients that the last backward pass has left, and their versions, by index.
        self.left: dict[int, tuple[Any, int]] = {}
        # Gradients that torch has set to 0, or clipped in a way that the audit does not repeat.
        self.reshaped: set[int] = set()

    def attach(self, audit: Any) -> None:
        """Also makes each call of the optimizer's `step` end the audited step, and makes `watch` report to this
        adapter."""
        watch()
        super().attach(audit)
        self.audit = audit
        ends = self.optimizer.register_step_post_hook(Hook(self._end_step))
        WATCHED.add(self)
        audit.undo.callback(ends.remove)
        audit.undo.callback(WATCHED.discard, self)

    def _end_step(self, optimizer: Any, *_: Any) -> None:
        if running_steps(optimizer) == 1:
            self.audit.end_step(skipped=self.audit.judges_step and overflows(optimizer))

    scaled_by = 1.0
    """The loss scale by which a GradScaler has divided the gradients since the last backward pass."""

    clipped_to = 0.0
    """The norm to which torch.nn.utils.clip_grad_norm_ has clipped the gradients since the last backward pass, or 0."""

    def gradients_before_pass(self, summed: Collection[int]) -> dict[int, Tensor | None]:
        """Returns all gradients, which the script may have changed between two backward passes."""
        return {index: self.parameters[index].grad for index in self.trained}

    def loss_scale(self) -> float:
        return self.scaled_by

    def clip_limit(self) -> float:
        return self.clipped_to

    def after_backward(self) -> None:
        self.scaled_by, self.clipped_to, self.clips_others, self.reshaped = 1.0, 0.0, False, set()
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
            gradient = parameter.grad
            is_other = gradient is not None and (left is None or left() is not gradient or version != gradient._version)
            if is_other or parameter._post_accumulate_grad_hooks:
                modified.add(index)
        return modified

    def removed_gradients(self) -> set[int]:
        return {index for index in self.left if self.parameters[index].grad is None}


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

    def begin_micro_batch(self) -> str:
        joins = any(wrapper._join_config.enable for wrapper in self.wrappers)
        return "ranks with fewer batches than others do not take part in a collective of the audit" if joins else ""

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
    """Makes torch's functions that clip, unscale or zero gradients report to the adapters in WATCHED. A second call
    does nothing."""
    for module in (nn.utils, nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
            if hasattr(module, name):
                wrap_function(module, name, _clip)
    wrap_function(torch.amp.GradScaler, "unscale_", _unscale)
    wrap_function(torch.amp.GradScaler, "step", _step)
    wrap_function(torch.optim.Optimizer, "zero_grad", _zero_grad)


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
            if by_norm and clipped == adapter.trained and not adapter.clipped_to:
                own = {id(adapter.parameters[index]) for index in clipped}
                adapter.clips_others |= any(each.grad is not None and id(each) not in own for each in parameters)
                adapter.clipped_to = 0.0 if adapter.clips_others else float(arguments["max_norm"])
                stack.enter_context(adapter.changes_accepted())
            else:
                adapter.reshaped |= clipped
        return clip(parameters, *args, **kwargs)


def _unscale(unscale: Any, scaler: Any, optimizer: Any) -> None:
    adapters = [each for each in _watching(optimizer) if scaler.is_enabled() and not each.audit.stopped]
    if records_cuda_graph():  # reading the scale would wait for the device
        adapters = []
    with ExitStack() as stack:
        for adapter in adapters:
            stack.enter_context(adapter.changes_accepted())
        unscale(scaler, optimizer)
    for adapter in adapters:
        adapter.scaled_by = scale = scaler.get_scale()
        if adapter.clipped_to:
            adapter.clipped_to /= scale
            adapter.audit.verdict.notes["clipping"] = (
                f"clip_grad_norm_ was called before unscale_, so it has clipped the gradients to {adapter.clipped_to:g}"
            )


def _zero_grad(zero_grad: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Makes gradients that are set to 0 count as modified. The versions of DTensors do not show it."""
    zero_grad(optimizer, *args, **kwargs)
    zeroed = {id(each) for group in optimizer.param_groups for each in group["params"] if each.grad is not None}
    for adapter in [*WATCHED]:  # `optimizer` may wrap the audited one, as Fabric's does
        adapter.reshaped |= {index for index in adapter.trained if id(adapter.parameters[index]) in zeroed}


def _step(step: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Ends the audited step also if the scaler does not call the optimizer, because a gradient overflowed."""
    audits = [(adapter.audit, adapter.audit.step) for adapter in _watching(optimizer)]
    result = step(scaler, optimizer, *args, **kwargs)
    for audit, before in audits:
        if audit.step == before:
            audit.end_step(skipped=True)
    return result
