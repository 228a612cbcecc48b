"""Audits trainings with Lightning: a callback, a strategy that runs DeepSpeed's engine on CPU ranks, and `stepcheck
module`."""

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
