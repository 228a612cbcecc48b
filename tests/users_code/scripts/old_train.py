"""A typical training loop, with options and mistakes that occur in migrations."""

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    """Has two layers with batch norm and dropout. With `recompute`, activations of the first layer are recomputed."""

    def __init__(self, dropout: float = 0.0, recompute: bool = False):
        super().__init__()
        self.recompute = recompute
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(dropout))
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns scores (N, 4) of samples (N, 12)."""
        hidden = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        return self.head(self.norm(hidden))


def samples() -> TensorDataset:
    """Returns 64 samples (12,) with labels from 0 to 3."""
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 12, generator=draw) + 1, torch.randint(4, (64,), generator=draw))


def groups_of(model: nn.Module, decay_of_biases: float = 0.0) -> list[dict[str, Any]]:
    """Returns a parameter group of all matrices, and one of all biases with another weight decay."""
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    matrices = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    return [{"params": matrices}, {"params": biases, "weight_decay": decay_of_biases}]


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in (
        *("--amp", "--recompute", "--tf32", "--resumed"),
        *("--sum", "--undivided", "--no_zero_grad", "--by_epoch", "--decay_all"),
    ):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--random_loss_in", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float, default=0.0)
    options = parser.parse_args()
    if options.tf32:
        torch.set_float32_matmul_precision("high")
        torch.set_num_threads(2)
    torch.manual_seed(5)
    model = Classifier(options.dropout, options.recompute)
    decay_of_biases = 0.1 if options.decay_all else 0.0
    optimizer = torch.optim.AdamW(groups_of(model, decay_of_biases), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5 if options.by_epoch else 0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=options.amp)
    loss_of = nn.CrossEntropyLoss(reduction="sum" if options.sum else "mean")
    loader = DataLoader(samples(), batch_size=8, shuffle=True)
    if options.resumed:
        moments = {"exp_avg": 0.1, "exp_avg_sq": 0.2}
        state = optimizer.state_dict()
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, weight in enumerate(weights):
            filled = {name: torch.full_like(weight, value) for name, value in moments.items()}
            state["state"][number] = {"step": torch.tensor(9.0), **filled}
        optimizer.load_state_dict(state)
    for _ in range(3):
        for number, (x, labels) in enumerate(loader, 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=options.amp):
                loss = loss_of(model(x - 1), labels)
            if number == options.random_loss_in:
                loss = loss + model.head.weight[torch.randperm(4)[0]].square().sum()
            scaler.scale(loss if options.undivided else loss / options.accumulate).backward()
            if number % options.accumulate:
                continue
            scaler.unscale_(optimizer)
            if options.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            scaler.step(optimizer)
            scaler.update()
            if not options.no_zero_grad:
                optimizer.zero_grad()
            if not options.by_epoch:
                scheduler.step()
        if options.by_epoch:
            scheduler.step()


if __name__ == "__main__":
    main()
