"""Trains, tests and evaluates a resolved run, with its Trainer, fast loop, metrics, loggers, callbacks and results."""

MODULE, DATAMODULE = "cifar_module:CIFARModule", "datamodule:CIFARDataModule"
"""The class paths of a run's LightningModule and LightningDataModule. Both are defined in files outside the package."""
