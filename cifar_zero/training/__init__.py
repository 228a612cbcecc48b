"""Assembles the Trainer of a run: the fast loop, metrics, test-time augmentation and callbacks."""

MODULE, DATAMODULE = "cifar_module:CIFARModule", "datamodule:CIFARDataModule"
"""The class paths of a run's LightningModule and LightningDataModule, which stand outside the package."""
