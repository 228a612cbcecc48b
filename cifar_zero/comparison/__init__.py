"""Trains one recipe under several strategies, reads the runs back, judges whether they agree, and writes the report."""

from typing import TYPE_CHECKING, Any

from cifar_zero.comparison.own_module import assert_agrees

if TYPE_CHECKING:
    from cifar_zero.step_check.callback import StepCheck

__all__ = ["StepCheck", "assert_agrees"]


def __getattr__(name: str) -> Any:
    """Imports StepCheck on first access, because it imports torch and Lightning, which would slow down --help of
    compare."""
    if name != "StepCheck":
        raise AttributeError(name)
    from cifar_zero.step_check.callback import StepCheck

    return StepCheck
