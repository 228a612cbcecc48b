"""many_runs with a vit_tiny whose step takes milliseconds and whose four heads can be split between two ranks."""

from __future__ import annotations

import sys

from cifar_zero.core import exits
from cifar_zero.models import LAYOUTS, Layout
from tests.support.many_runs import main

LAYOUTS["tiny"] = Layout(width=64, depth=4, heads=4)

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(exits.guarded(main))
