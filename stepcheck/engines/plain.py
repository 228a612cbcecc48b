"""Views of plain PyTorch and of DistributedDataParallel."""

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
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

from stepcheck.engines.view import Hook, NotAuditable, View

SENT_IN = {allreduce_hook: None, bf16_compress_hook: torch.bfloat16, fp16_compress_hook: torch.float16}
"""The dtype in which DDP's communication hooks send gradients; None for the gradient's own."""


class PlainView(View):
    """One process, in which nothing averages gradients."""

    def __init__(self, module: nn.Module, optimizer: Any):
        super().__init__(module, optimizer)
        if self.ranks.size > 1 and type(self) is PlainView:
            raise NotAuditable("several ranks train without DDP or FSDP, so whose gradients are averaged is unknown")

    def attach(self, audit: Any) -> list[Callable[[], None]]:
        """Ends a step after each call of the optimizer, and learns of clipping and of loss scaling."""
        watch()
        handles = super().attach(audit)
        ends = self.optimizer.register_step_post_hook(Hook(lambda *_: audit.depth or audit.end_step()))
        self.kept: dict[int, tuple[Any, int]] = {}  # gradients after the backward pass, and their versions, by index
        WATCHED[id(self.optimizer)] = self
        return [*handles, ends.remove, self._forget]

    def _forget(self) -> None:
        WATCHED.pop(id(self.optimizer), None)

    scaled_by: float | None = None
    """The factor of a GradScaler that has divided the gradients by it."""

    clipped_to: float | None = None
    """The norm to which torch.nn.utils.clip_grad_norm_ has clipped gradients of this step."""

    def starts_anew(self, index: int) -> bool:
        return self.parameters[index].grad is None

    def accumulated(self, index: int) -> Tensor | None:
        return self.parameters[index].grad

    def loss_scale(self) -> float:
        fused = getattr(self.optimizer, "grad_scale", None) is not None  # the optimizer divides by the scale itself
        return self.scaled_by if self.scaled_by and not fused else 1.0

    def clip_limit(self) -> float:
        return self.clipped_to or 0.0

    def after_backward(self) -> None:
        self.scaled_by = self.clipped_to = None
        self._keep(self.trained)

    def _keep(self, indices: set[int]) -> None:
        """Remembers which gradients the backward pass, or a function that is known, has left."""
        self.kept = {index: each for index, each in self.kept.items() if index not in indices}
        for index in indices:
            gradient = self.parameters[index].grad
            if gradient is not None and not self.parameters[index]._post_accumulate_grad_hooks:
                self.kept[index] = weakref.ref(gradient), self.local(gradient)._version

    def foreign_gradients(self) -> set[int]:
        """Returns the gradients that are other tensors than after the backward pass, or were written to since."""
        foreign = set()
        for index in self.trained:
            gradient = self.parameters[index].grad
            known, version = self.kept.get(index, (lambda: None, 0))
            if gradient is not None and (known() is not gradient or self.local(gradient)._version != version):
                foreign.add(index)
        return foreign

    @contextmanager
    def known_change(self) -> Iterator[None]:
        """Within this context, a function changes gradients in a way that the audit expects."""
        intact = self.trained - self.foreign_gradients()
        yield
        self._keep(intact)


class DDPView(PlainView):
    """DistributedDataParallel: each rank has the mean of all ranks' gradients."""

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
        return f"DDP, {self.ranks.size} ranks"

    def gradient_replicas(self, index: int) -> int:
        return self.ranks.size

    def weight_replicas(self, index: int) -> int:
        return self.ranks.size

    def rounding_dtypes(self) -> set[torch.dtype]:
        return super().rounding_dtypes() | {dtype for hook in self.hooks if (dtype := SENT_IN[hook]) is not None}


WATCHED: MutableMapping[int, PlainView] = weakref.WeakValueDictionary()
"""The views of audited optimizers, by the optimizer's id. The functions below tell them what they do to gradients."""


def watch() -> None:
    """Makes torch's functions that clip and unscale gradients report to the views. A second call does nothing."""
    clipping: Any = nn.utils.clip_grad
    scaler = torch.amp.GradScaler
    if hasattr(scaler.step, "watched"):
        return
    # Global names of torch's module, because a script may have imported its functions by name.
    get_norm, clip = clipping._get_total_norm, clipping._clip_grads_with_norm_
    unscale, step = scaler.unscale_, scaler.step

    def _get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        norm = get_norm(tensors, norm_type, *args, **kwargs)
        norm.is_euclidean = norm_type == 2
        return norm

    def _clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        given = {id(each) for each in parameters}
        with ExitStack() as known:
            for view in [*WATCHED.values()]:
                whole = given >= {id(view.parameters[index]) for index in view.trained}
                if whole and getattr(total_norm, "is_euclidean", False) and view.clipped_to is None:
                    known.enter_context(view.known_change())
                    view.clipped_to = float(max_norm)
            clip(parameters, max_norm, total_norm, *args, **kwargs)

    def unscale_(self: Any, optimizer: Any) -> None:
        view = WATCHED.get(id(optimizer)) if self.is_enabled() else None
        if view is None:
            return unscale(self, optimizer)
        with view.known_change():
            unscale(self, optimizer)
        view.scaled_by = self.get_scale()
        return None

    def scaler_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if id(optimizer) in WATCHED and self.is_enabled():
            WATCHED[id(optimizer)].scaled_by = self.get_scale()
        return step(self, optimizer, *args, **kwargs)

    scaler_step.watched = True
    clipping._get_total_norm, clipping._clip_grads_with_norm_ = _get_total_norm, _clip_grads_with_norm_
    scaler.unscale_, scaler.step = unscale_, scaler_step
