"""Finds hooks of a user's code that change gradients. Under DeepSpeed these hooks have no effect, because the engine
keeps gradients elsewhere. In plain PyTorch they change what the optimizer gets."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import Tensor

from stepcheck.engines.adapter import same_values

LIBRARIES = {"lightning", "pytorch_lightning", "torch", "stepcheck"}

HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
"""The hooks between the backward pass and the optimizer's step."""


class UserHooks:
    """Finds the user's HOOKS, of callbacks and of the module, that change gradients, by running them on a plain
    copy."""

    def __init__(self, trainer: Trainer, module: LightningModule, clip_limit: float):
        """Lists the hooks, without those of a callback or module whose attribute `keeps_gradients` is true.

        Args:
            clip_limit: Norm to which the engine itself clips, or 0.
        """
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        owners = [each for each in (*callbacks, module) if not getattr(each, "keeps_gradients", False)]
        self.trainer, self.module, self.clip_limit = trainer, module, clip_limit
        self.hooks = [(owner, name) for owner in owners for name in HOOKS if _is_users(getattr(owner, name, None))]
        self.names = [f"{name} of {type(owner).__name__}" for owner, name in self.hooks]

    def changing(self, plain: Any) -> list[str]:
        """Returns the names of the hooks that change gradients. Calls each hook once on `plain`, a copy of the module
        that has the gradients of a step. A hook gets the gradients as the hooks before it have left them."""
        optimizer = optimizer_of(plain.configure_optimizers())
        plain.optimizers = lambda *args, **options: optimizer
        plain.clip_gradients = self._clip  # DeepSpeed's plugin clips nothing when it is called
        arguments: dict[str, list[Any]] = {
            "on_after_backward": [],
            "on_before_optimizer_step": [optimizer],
            HOOKS[2]: [optimizer, self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm],
        }
        found = []
        with _without_gradients(self.module):
            for (owner, name), text in zip(self.hooks, self.names, strict=True):
                before = _gradients(plain)
                if isinstance(owner, Callback):
                    getattr(_copy_of(owner), name)(self.trainer, plain, *arguments[name])
                else:
                    getattr(plain, name)(*arguments[name])
                after = _gradients(plain)
                if before.keys() != after.keys() or not all(same_values(after[key], before[key]) for key in before):
                    found.append(text)
        return found

    def _clip(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        limit = gradient_clip_val or self.trainer.gradient_clip_val or 0.0
        kind = GradClipAlgorithmType(gradient_clip_algorithm or self.trainer.gradient_clip_algorithm or "norm")
        if kind == GradClipAlgorithmType.NORM and limit == self.clip_limit:  # the engine does this
            return
        Precision().clip_gradients(optimizer, limit, kind)


def _gradients(module: Any) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}


def optimizer_of(configured: Any) -> Any:
    if isinstance(configured, dict):
        configured = configured.get("optimizer")
    while isinstance(configured, (list, tuple)):
        configured = configured[0] if configured else None
    return configured if hasattr(configured, "param_groups") else None


def _is_users(hook: Any) -> bool:
    return hook is not None and (getattr(hook, "__module__", None) or "").partition(".")[0] not in LIBRARIES


def _copy_of(callback: Callback) -> Any:
    """Returns a deep copy of a callback that logs nothing. Lightning binds `log` to the trained module."""
    other: Any = copy.copy(callback)
    own = {name: value for name, value in vars(callback).items() if name not in ("log", "log_dict")}
    vars(other).update(copy.deepcopy(own))
    other.log = other.log_dict = lambda *args, **options: None
    return other


@contextmanager
def _without_gradients(module: LightningModule) -> Iterator[None]:
    """Hides the gradients of the trained module from a hook that reaches them through the Trainer."""
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
