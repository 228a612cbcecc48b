"""LightningModules as users write them. Each has a feature that may be difficult for a strategy or a replay."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset


def images(count: int = 96) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 24, generator=draw), torch.randint(0, 10, (count,), generator=draw))


class Own(LightningModule):
    """Trains a classifier `net`, which maps inputs to ten scores."""

    net: Any

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(self.net(inputs).float(), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(images(), 4, shuffle=True)


class Encoder(Own):
    """A transformer of tokens, with a head tied to the embedding, and frequencies of positions in float32, which no
    checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(16) / 16), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (words,) = batch
        hidden = self.embedding(words)
        angles = torch.outer(torch.arange(words.shape[1], device=words.device), self.frequencies)  # pyright: ignore
        mask = nn.Transformer.generate_square_subsequent_mask(len(angles), words.device, hidden.dtype)
        hidden = self.layer(hidden + angles.cos().to(hidden.dtype), mask, is_causal=True)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())

    def train_dataloader(self) -> Any:
        words = torch.randint(0, 50, (96, 9), generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(words), 4, shuffle=True)


class Contrastive(Own):
    """Gathers the embeddings of all ranks within its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, _ = batch
        one = F.normalize(self.net(inputs), dim=1)
        other = F.normalize(self.net(inputs + 0.1 * torch.randn_like(inputs)), dim=1)
        gathered: Any = self.all_gather(other, sync_grads=True)
        others = gathered.reshape(-1, 8)
        return F.cross_entropy(
            one.float() @ others.float().T / 0.1, torch.arange(len(one)) + len(one) * self.global_rank
        )


class Plateau(Own):
    """Needs validation and a logger, for ReduceLROnPlateau, EarlyStopping, LearningRateMonitor and
    logger.experiment."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(24, 10)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"},
        }

    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss", patience=50), LearningRateMonitor("step")]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logger.experiment.add_scalar("seen", batch_idx)  # pyright: ignore
        self.log("val_loss", F.cross_entropy(self.net(batch[0]).float(), batch[1]))

    def val_dataloader(self) -> Any:
        return DataLoader(images(8), 4)

    def train_dataloader(self) -> Any:
        return DataLoader(images(16), 4)


MODULES = (Encoder, Contrastive, Plateau)
