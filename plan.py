"""Predicts the memory that a run needs under each strategy and recommends one; see --help."""

from cifar_zero.core import interrupt

if __name__ == "__main__":
    interrupt.install()  # before the other imports

import sys

from cifar_zero.core.exits import guarded
from cifar_zero.planning.plan import main

if __name__ == "__main__":
    sys.exit(guarded(main))
