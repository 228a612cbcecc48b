"""Runs the hooks with which a user changes gradients on the plain copy of a module.

DeepSpeed's ZeRO takes the gradients out of the parameters, so these hooks change nothing there. Under the strategies of
plain PyTorch they change what the optimizer gets.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import Tensor

from cifar_zero.step_check.guard import describe
from cifar_zero.step_check.replay import Exact, PlainCopy, random_state_kept
from cifar_zero.step_check.user_code import UserHook, owners_of_hooks, user_hooks

CLIP = "configure_gradient_clipping"


class GradientHooks:
    """Runs the hooks of the module and of the callbacks in Lightning's order. The hooks of a callback run on a copy of
    the callback."""

    def __init__(
        self, check: Callback, trainer: Trainer, module: LightningModule, plain: PlainCopy, optimizer: Any
    ) -> None:
        """Looks up the hooks.

        Args:
            check: The callback that reads the gradients of the training in its own `on_before_optimizer_step`.
            trainer: The Trainer.
            module: The module that is trained.
            plain: Its plain copy.
            optimizer: The optimizer of the plain copy, for the hooks.
        """
        self._trainer, self._module, self._plain, self._optimizer = trainer, module, plain, optimizer
        self._check: Any = check
        owners = owners_of_hooks(trainer, module)
        position = next(number for number, owner in enumerate(owners) if owner is check)
        self.after_backward = user_hooks(owners, "on_after_backward")
        self.before_check = [*self.after_backward, *user_hooks(owners[:position], "on_before_optimizer_step")]
        """Hooks that have already changed the gradients when the check reads them."""
        self.after_check = user_hooks(owners[position + 1 :], "on_before_optimizer_step")
        self.clips = user_hooks([module], CLIP)
        """The user's own clipping, or clipping by value. Empty if the gradient is clipped by its norm."""
        if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self.clips = [UserHook(module, CLIP)]
        plain.module.optimizers = lambda *args, **options: optimizer
        plain.module.clip_gradients = self._clip  # DeepSpeed's plugin clips nothing when it is called
        plain.after_backward = self._after_micro_batch if self.after_backward else None

    def run(
        self,
        hooks: Sequence[UserHook],
        gradients: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        scale: float = 1.0,
        exact: bool = False,
        random_state: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Returns the gradients after hooks have run, in float64 on the CPU. Gradients that no hook changes are
        returned as they are, and all are if a hook fails. Gradients that a hook sets to None are left out.

        Args:
            hooks: The hooks.
            gradients: Unsharded gradients by name, which are the same on all ranks.
            tensors: Unsharded float32 weights and buffers before the step, by name.
            scale: Loss scale of float16, by which gradients are multiplied while the hooks run.
            exact: Whether the hooks compute in float64 instead of float32.
            random_state: torch's random state before the hooks. By default it is the current one.
        """
        scaled = {name: gradient * scale for name, gradient in gradients.items()}
        found: dict[str, Tensor] = {}
        with self._plain.holding(scaled, tensors, exact) as parameters:
            with random_state_kept():
                if random_state is not None:
                    torch.set_rng_state(random_state)
                if not self._call(hooks, exact):
                    return dict(gradients)
            for name, parameter in parameters.items():
                left = parameter.grad
                if left is not None:
                    same = torch.equal(left, scaled[name].to(parameter))
                    found[name] = gradients[name] if same else left.double().cpu() / scale
        return found

    def _call(self, hooks: Sequence[UserHook], exact: bool) -> bool:
        """Runs hooks on the copy. If one fails, adds a note to the verdict and returns False."""
        trainer, plain = self._trainer, self._plain.module
        arguments: dict[str, list[Any]] = {
            "on_before_optimizer_step": [self._optimizer],
            CLIP: [self._optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm],
        }
        with _without_gradients(self._module), Exact(torch.float32) if exact else nullcontext():
            for hook in hooks:
                given = arguments.get(hook.name, [])
                try:
                    if isinstance(hook.owner, Callback):
                        getattr(_copy_of(hook.owner), hook.name)(trainer, plain, *given)
                    else:
                        getattr(plain, hook.name)(*given)
                except Exception as error:  # a hook may read the engine, which the copy lacks
                    self._check.verdict.note(f"what {hook} changes, because it fails on a copy ({describe(error)})")
                    return False
        return True

    def _after_micro_batch(self, exact: bool) -> None:
        self._call(self.after_backward, exact)

    def _clip(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        limit = gradient_clip_val or self._trainer.gradient_clip_val or 0.0
        kind = gradient_clip_algorithm or self._trainer.gradient_clip_algorithm or "norm"
        Precision().clip_gradients(optimizer, limit, GradClipAlgorithmType(kind))


def _copy_of(callback: Callback) -> Any:
    """Returns a deep copy of a callback that logs nothing. Lightning binds `log` to the trained module."""
    other: Any = copy.copy(callback)
    own = {name: value for name, value in vars(callback).items() if name not in ("log", "log_dict")}
    vars(other).update(copy.deepcopy(own))
    other.log = other.log_dict = lambda *args, **options: None
    return other


@contextmanager
def _without_gradients(module: LightningModule) -> Iterator[None]:
    """Hides the gradients of the trained module in the context, so that a hook which reaches them through the Trainer
    does not change the training."""
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def ignored(hooks: Sequence[UserHook], module: LightningModule) -> str:
    """Returns a text that says that hooks change gradients, and that the strategy does not use the changed gradients if
    the parameters of `module` hold none."""
    names = " and ".join(map(str, hooks))
    if any(parameter.grad is not None for parameter in module.parameters()):
        return f"{names} changes gradients"
    return f"{names} changes gradients, and DeepSpeed ignores that; to clip, use the Trainer's gradient_clip_val"
