"""Classifies image files with a checkpoint or an export; see --help."""

import sys

from cifar_zero.core.exits import guarded
from cifar_zero.exporting.predict import main

if __name__ == "__main__":
    sys.exit(guarded(main))
