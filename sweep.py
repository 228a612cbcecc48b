"""Trains a recipe with many settings and seeds and reports which one is best; see --help."""

from cifar_zero.core import interrupt

if __name__ == "__main__":
    interrupt.install()  # before the other imports

import sys
from functools import partial

import train
from cifar_zero.core.exits import guarded
from cifar_zero.sweeping.sweep import main

if __name__ == "__main__":
    sys.exit(guarded(partial(main, train.__file__)))
