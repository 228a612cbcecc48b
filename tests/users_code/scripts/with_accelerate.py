"""A training loop with Accelerate, which prefetches batches, and the LightningModule to which it was migrated."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def network() -> nn.Module:
    """Returns a model of two layers with dropout."""
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))


class Migrated(LightningModule):
    """Trains like the loop. The Trainer accumulates and clips the gradients."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the mean cross-entropy."""
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Returns AdamW, with a learning rate that falls in each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(TensorDataset(torch.randn(64, 12), torch.randint(4, (64,))), batch_size=8, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    for _ in range(3):
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
