"""Tests a checkpoint of any strategy on one device; see --help."""

from cifar_zero.core import interrupt

if __name__ == "__main__":
    interrupt.install()  # before the other imports

import sys
from functools import partial

from cifar_zero.core.exits import guarded
from cifar_zero.training.evaluate import main


def classes():
    """Returns the LightningModule and LightningDataModule; imported late because they import Lightning."""
    from cifar_module import CIFARModule
    from datamodule import CIFARDataModule

    return CIFARModule, CIFARDataModule


if __name__ == "__main__":
    sys.exit(guarded(partial(main, classes)))
