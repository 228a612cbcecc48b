"""A parameter of a user's module that DeepSpeed cannot take is named in one line."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cifar_zero.core.errors import UsageError
from cifar_zero.strategies.deepspeed import ZeROStrategy


class Scaled(LightningModule):
    """Has a linear layer, and a scale without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(()))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.layer(batch[0]).mean() * self.scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.usefixtures("own_process_group")
def test_a_parameter_that_deepspeed_cannot_take_is_named():
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=1, strategy=ZeROStrategy(2), max_steps=1, **quiet)
    with pytest.raises(UsageError, match=r"scale is a scalar.*give it the shape"):
        trainer.fit(Scaled(), DataLoader(TensorDataset(torch.randn(16, 4)), 2))
