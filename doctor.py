"""Checks that this computer, or the nodes of a cluster, can train; see --help."""

from cifar_zero.core import interrupt

if __name__ == "__main__":
    interrupt.install()  # before the other imports

import sys

from cifar_zero.core.exits import guarded
from cifar_zero.diagnosis.doctor import main

if __name__ == "__main__":
    sys.exit(guarded(main))
