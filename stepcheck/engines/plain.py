"""Views of plain PyTorch and of DistributedDataParallel."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from stepcheck.engines.view import NotAuditable, View

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
        handles = super().attach(audit)
        ends = self.optimizer.register_step_post_hook(lambda *_: audit.depth or audit.end_step())
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

    def begin_step(self) -> None:
        self.scaled_by = self.clipped_to = None


class DDPView(PlainView):
    """DistributedDataParallel: each rank has the mean of all ranks' gradients."""

    def __init__(self, module: nn.Module, optimizer: Any, wrappers: Sequence[DistributedDataParallel]):
        super().__init__(module, optimizer)
        self.hooks = [hook for wrapper in wrappers for hook, _ in getattr(wrapper, "_comm_hooks", [])]
        unknown = [hook.__name__ for hook in self.hooks if hook not in SENT_IN]
        if unknown:
            raise NotAuditable(f"DDP's communication hook {unknown[0]} may send other values than the gradients")

    @property
    def label(self) -> str:
        return f"DDP, {self.ranks.size} ranks"

    def gradient_replicas(self, index: int) -> int:
        return self.ranks.size

    def weight_replicas(self, index: int) -> int:
        return self.ranks.size

    def rounding_dtypes(self) -> set[torch.dtype]:
        return super().rounding_dtypes() | {dtype for hook in self.hooks if (dtype := SENT_IN[hook]) is not None}


WATCHED: dict[int, PlainView] = {}
"""The views of audited optimizers, by the optimizer's id. The functions below tell them what they do to gradients."""


def watch() -> None:
    """Makes torch's functions that clip and unscale gradients report to the views. A second call does nothing."""
    if hasattr(nn.utils.clip_grad_norm_, "watched"):
        return
    clip, step = nn.utils.clip_grad_norm_, torch.amp.GradScaler.step

    def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        clipped = {id(each) for each in parameters}
        for view in WATCHED.values():
            if any(id(view.parameters[index]) in clipped for index in view.trained):
                view.clipped_to = float(max_norm)
        return clip(parameters, max_norm, *args, **kwargs)

    def scaler_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if id(optimizer) in WATCHED and self.is_enabled():
            WATCHED[id(optimizer)].scaled_by = self.get_scale()
        return step(self, optimizer, *args, **kwargs)

    clip_grad_norm_.watched = True
    nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_
    torch.amp.GradScaler.step = scaler_step
