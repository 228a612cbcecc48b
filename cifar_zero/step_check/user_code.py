"""Finds what a user's code may change in a training: the hooks of the module and of the callbacks."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

NOT_USERS = {"lightning", "pytorch_lightning", "torch", "builtins", "cifar_zero", "cifar_module"}
"""Packages whose hooks change neither gradients nor weights, and whose classes are not searched by `mentions`."""


@dataclass
class UserHook:
    """A hook that a user has written, in the module or in a callback."""

    owner: Callback | LightningModule
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {type(self.owner).__name__}"


def user_hooks(owners: Sequence[Callback | LightningModule], *names: str) -> list[UserHook]:
    """Returns the hooks with one of these names that the user has written, by name and then in the order of
    `owners`."""
    return [
        UserHook(owner, name)
        for name in names
        for owner in owners
        if hasattr(owner, name) and _package(getattr(owner, name)) not in NOT_USERS
    ]


def owners_of_hooks(trainer: Trainer, module: LightningModule) -> list[Any]:
    """Returns the objects whose hooks Lightning calls, in the order of the calls."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return [*callbacks, module]


def mentions(owners: Sequence[Callback | LightningModule], *texts: str) -> bool:
    """Returns whether the source of a user's class contains one of these texts, or cannot be read."""
    kinds = {kind for owner in owners for kind in type(owner).__mro__ if _package(kind) not in NOT_USERS}
    try:
        return any(text in inspect.getsource(kind) for kind in kinds for text in texts)
    except (OSError, TypeError):  # a class that was defined in a notebook or by exec
        return True


def may_set_options(owners: Sequence[Callback | LightningModule]) -> bool:
    """Returns whether the module or a callback may set options of the optimizer: it mentions `param_groups`, or has the
    attribute `changes_options`."""
    return any(getattr(owner, "changes_options", False) for owner in owners) or mentions(owners, "param_groups")


def _package(item: Callable[..., Any]) -> str:
    return (getattr(item, "__module__", None) or "").partition(".")[0]
