"""The LightningModule that old_train.py was migrated to."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from old_train import Classifier, groups_of, samples
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Migrated(LightningModule):
    """Trains the script's classifier on the script's samples, which are shifted and scaled when they are loaded. With
    `divided`, divides its loss, as Lightning does too."""

    def __init__(
        self,
        dropout: float = 0.0,
        recompute: bool = False,
        scale: float = 1.0,
        divided: bool = False,
    ):
        super().__init__()
        self.model, self.scale, self.divided = Classifier(dropout, recompute), scale, divided

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean cross-entropy."""
        x, labels = batch
        parts = self.trainer.accumulate_grad_batches if self.divided else 1
        return F.cross_entropy(self.model(x - 1), labels) / parts

    def configure_optimizers(self) -> Any:
        """Returns AdamW without weight decay of biases, and a schedule that changes the learning rate after each
        step."""
        optimizer = torch.optim.AdamW(groups_of(self), lr=0.01, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns batches of 8 shuffled samples."""
        x, labels = samples().tensors
        return DataLoader(TensorDataset(x * self.scale, labels), batch_size=8, shuffle=True)
