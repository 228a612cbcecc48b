"""Trains one recipe under several strategies, reads the runs back, judges whether they agree, and writes the report."""

from typing import TYPE_CHECKING, Any

from cifar_zero.comparison.own_module import assert_agrees

if TYPE_CHECKING:
    from cifar_zero.step_check.callback import StepCheck

__all__ = ["StepCheck", "assert_agrees"]


def __getattr__(name: str) -> Any:
    """Imports and returns `StepCheck` on first access. An import at the top of this file would load torch and
    Lightning, and slow down `cifar-zero compare --help`. Raises AttributeError for any other name."""
    if name != "StepCheck":
        raise AttributeError(name)
    from cifar_zero.step_check.callback import StepCheck

    return StepCheck
