"""Trains one recipe under several strategies and says whether they agree; see --help."""

from cifar_zero.core import interrupt

if __name__ == "__main__":
    interrupt.install()  # before the other imports

import sys
from functools import partial

import train
from cifar_zero.comparison.compare import main
from cifar_zero.core.exits import guarded
from evaluate import classes

if __name__ == "__main__":
    sys.exit(guarded(partial(main, train.train, lambda: classes()[0], lambda: classes()[1])))
