"""Trains one recipe under several strategies, reads the runs back, judges whether they agree, and writes the report."""

from cifar_zero.comparison.recorded.own_module import assert_agrees

__all__ = ["assert_agrees"]
