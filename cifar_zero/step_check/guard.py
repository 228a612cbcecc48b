"""Keeps the failures of a step check away from the training that it checks. Defines `Guarded`, the base class of the
check, and `exchange`, with which the ranks of a check exchange values.

If the check fails on one rank, every rank abandons the check of the step in the same hook, and the training goes on.
Ranks that wait for different messages would hang, so every rank learns of a failure in the next `exchange`. A check
must therefore call `exchange` before each collective operation of another library if its code since the last
`exchange` may fail on one rank only.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, TypeVar

from lightning.pytorch import Callback

from cifar_zero.core.errors import RunError, UsageError, short
from cifar_zero.launch.collectives import gather

T = TypeVar("T")


class AbandonedError(Exception):
    """Raised on every rank if the check has failed on any rank. The message is the first failure."""


def exchange(value: T, failure: str = "") -> list[T]:
    """Returns the `value` of each rank, in rank order. Every rank must call this function. If a rank passes a
    `failure`, raises AbandonedError on every rank."""
    received = gather((failure, value))
    for failure, _ in received:
        if failure:
            raise AbandonedError(failure)
    return [value for _, value in received]


def describe(failure: Exception) -> str:
    """Returns the type and the message of an exception in one line."""
    return short(f"{type(failure).__name__}: {failure}", 240)


class Guarded(Callback):
    """A callback whose hooks never raise, except for UsageError and RunError, which it raises on purpose on every rank.
    Any other exception in a hook ends the check of the step on every rank."""

    GUARDED: ClassVar[dict[str, bool]] = {
        "setup": False,
        "on_fit_start": True,
        "on_train_start": True,
        "on_micro_batch_start": False,
        "on_before_optimizer_step": False,
        "on_train_batch_end": False,
        "on_train_epoch_end": True,
        "on_train_end": True,
    }
    """The hooks, and whether the ranks meet at the end of each call. They also meet at the end of any hook of a step
    that is being checked."""

    _in_hook = False

    def __init_subclass__(cls) -> None:
        for name in cls.GUARDED.keys() & vars(cls).keys():
            setattr(cls, name, _guarded(vars(cls)[name]))

    def is_checking(self) -> bool:
        """Returns whether the current step is being checked. Must be the same on all ranks."""
        raise NotImplementedError

    def abandon(self, hook: str, failure: str) -> None:
        """Ends the check of the step. Called on every rank.

        Args:
            hook: The name of the hook in which the check failed.
            failure: What happened, in one line.
        """
        raise NotImplementedError


def _guarded(hook: Callable[..., None]) -> Callable[..., None]:
    @wraps(hook)
    def run(self: Guarded, *args: Any, **options: Any) -> None:
        if self._in_hook:  # called by the hook of a subclass, which is guarded
            return hook(self, *args, **options)
        name, failure = hook.__name__, ""
        meets, self._in_hook = self.GUARDED[name] or self.is_checking(), True
        try:
            try:
                hook(self, *args, **options)
            except (UsageError, RunError, AbandonedError):
                raise
            except Exception as error:  # the check and the user's code, which it runs again, may raise anything
                failure = describe(error)
            if failure or meets or self.is_checking():
                exchange(None, failure)
        except AbandonedError as error:
            self.abandon(name, str(error))
        finally:
            self._in_hook = False

    return run
