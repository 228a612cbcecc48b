"""train.py without the figures of its test, which are most of a short run; tests/callbacks has them."""

from __future__ import annotations

import sys

import exits
import train
from callbacks.figures import TestFigures

if __name__ == "__main__":
    TestFigures.on_test_end = lambda self, trainer, pl_module: None
    sys.exit(exits.guarded(train.main))
