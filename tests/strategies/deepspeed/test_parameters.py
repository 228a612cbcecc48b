"""Parameters and groups of a user's module that DeepSpeed cannot take: dropped, or named in one line."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cifar_zero.core.errors import UsageError
from cifar_zero.strategies.deepspeed import ZeROStrategy


class Small(LightningModule):
    """A linear layer and one more parameter."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(shape))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.layer(batch[0]).mean() * self.scale.sum()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(stage: int, shape: tuple[int, ...]) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=1, strategy=ZeROStrategy(stage), max_steps=4, **quiet)
    trainer.fit(Small(shape), DataLoader(TensorDataset(torch.randn(16, 4)), 2))
    return trainer


@pytest.mark.usefixtures("own_process_group")
def test_a_parameter_that_deepspeed_cannot_take_is_named():
    with pytest.raises(UsageError, match=r"scale has no dimensions.*give it the shape"):
        fit(2, ())
