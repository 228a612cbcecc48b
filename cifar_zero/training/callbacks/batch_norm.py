"""Running statistics of batch normalisation, the same on all ranks wherever they are used."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cifar_zero.checkpoints.finetuning.network import counting
from cifar_zero.launch.collectives import average_over_ranks


class BatchNormStatistics(Callback):
    """Averages the running means and variances over the ranks before each validation, test and checkpoint.

    In training a rank normalises by its own micro-batch, and its running statistics are of the images that it has seen.
    No training step reads them, so no step has to wait for the other ranks: torch's DistributedDataParallel would
    send those of rank 0 to all others in every step, and DeepSpeed (0.19.8) would leave each rank its own, evaluate as
    many models as there are ranks and save the first. Their average has seen all images, under every strategy.
    """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Averages."""
        average(pl_module)

    on_test_start = on_validation_start

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Averages in place, and in the copies that the checkpoint may already have; called on every rank."""
        average(pl_module)
        saved = checkpoint.get("state_dict", {})
        for name, buffer in pl_module.named_buffers():
            if name in saved:
                saved[name].copy_(buffer)


def average(module: LightningModule) -> None:
    """Replaces each running mean and variance by its average over the ranks; every rank must call it.

    Other buffers stay: numbers of batches are the same on all ranks, and statistics of frozen layers do not change.
    """
    pairs = ((layer.running_mean, layer.running_var) for layer in counting(module))
    average_over_ranks([value for pair in pairs for value in pair if value is not None])
