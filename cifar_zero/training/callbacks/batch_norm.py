"""Running statistics of batch normalisation, one and the same on all ranks wherever they count."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from cifar_zero.checkpoints.finetuning.freeze import counting
from cifar_zero.launch.collectives import average_over_ranks


class BatchNormStatistics(Callback):
    """Averages the running means and variances over the ranks before each validation, test and checkpoint.

    In training a rank normalises by its own micro-batch, and its running statistics are of the images that it has seen.
    No training step reads them, so that no step has to wait for the other ranks: torch's DistributedDataParallel would
    send those of rank 0 to all others in every step, and DeepSpeed (0.19.8) would leave each rank its own, evaluate as
    many networks as there are ranks and save the first. Their average has seen all images, under every strategy.
    """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Averages."""
        average(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Averages."""
        average(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Averages in place, and in the checkpoint, where that has copies already; called on every rank."""
        average(pl_module)
        saved = checkpoint.get("state_dict", {})
        for name, buffer in pl_module.named_buffers():
            if name in saved:
                saved[name].copy_(buffer)


def average(network: torch.nn.Module) -> None:
    """Puts the average over the ranks in place of each running mean and variance; to be called by every rank.

    Numbers of batches are the same on all ranks, other buffers are no statistics, and those of frozen layers do not
    change: all of them stay.
    """
    average_over_ranks(_statistics(network))


def _statistics(network: torch.nn.Module) -> list[Tensor]:
    pairs = ((layer.running_mean, layer.running_var) for layer in counting(network))
    return [value for pair in pairs for value in pair if value is not None]
