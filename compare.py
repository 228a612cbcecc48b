"""Trains one recipe under several strategies and says whether they agree; see --help."""

import sys
from functools import partial

import train
from cifar_zero.comparison.compare import main
from cifar_zero.core.exits import guarded


def module_class():
    """Returns the LightningModule of the runs; imported late because it imports Lightning."""
    from cifar_module import CIFARModule

    return CIFARModule


def datamodule_class():
    """Returns their LightningDataModule."""
    from datamodule import CIFARDataModule

    return CIFARDataModule


if __name__ == "__main__":
    sys.exit(guarded(partial(main, train.train, module_class, datamodule_class)))
