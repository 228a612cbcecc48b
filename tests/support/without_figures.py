"""train.py without the figures of its test, which are most of a short run's time."""

from __future__ import annotations

import sys

import train
from cifar_zero.core import exits


def draw_no_figures() -> None:
    """Replaces the callback of the figures by one that does nothing."""
    from lightning.pytorch import Callback

    from cifar_zero.training import build

    build.TestFigures = Callback


def main() -> int:
    """Trains as a rank that a launcher has started; returns the exit code."""
    draw_no_figures()
    return train.main()


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
