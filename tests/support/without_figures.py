"""train.py without the figures of its test, which are most of a short run's time."""

from __future__ import annotations

import sys
from functools import partial

import train
from cifar_zero.core import exits

if __name__ == "__main__":
    sys.exit(exits.guarded(partial(train.main, figures=False)))
