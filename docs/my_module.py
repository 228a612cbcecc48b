"""A LightningModule to check: stepcheck module docs/my_module.py:MyModule --devices 2 --accumulate 2"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MyModule(lightning.LightningModule):
    def __init__(self, lr: float = 0.001):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
        self.lr = lr

    def training_step(self, batch):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        images = torch.randn(640, 64)
        return DataLoader(TensorDataset(images, images.argmax(dim=1) % 10), batch_size=16, shuffle=True)
