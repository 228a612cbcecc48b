"""Tests a checkpoint of any strategy on one device; see --help."""

from cifar_zero.core.interrupt import start


def classes():
    """Returns the LightningModule and LightningDataModule; imported late because they import Lightning."""
    from cifar_module import CIFARModule
    from datamodule import CIFARDataModule

    return CIFARModule, CIFARDataModule


if __name__ == "__main__":
    start("cifar_zero.training.evaluate", classes)
