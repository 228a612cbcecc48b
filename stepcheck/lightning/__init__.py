"""The check in Lightning: a callback, and a strategy with which DeepSpeed's engine trains on CPU ranks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepcheck.lightning.callback import StepCheck

__all__ = ["StepCheck"]


def __getattr__(name: str) -> Any:
    """Imports the callback at its first use, so that the command line starts without importing Lightning."""
    if name != "StepCheck":
        raise AttributeError(name)
    from stepcheck.lightning.callback import StepCheck

    return StepCheck
