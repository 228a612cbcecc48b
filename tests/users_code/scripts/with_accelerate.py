"""Trains the model of old_train.py in a loop with Accelerate, which prefetches batches, accumulates and clips."""

import torch
import torch.nn.functional as F
from migrated import Migrated
from old_train import samples
from torch.utils.data import DataLoader


def main() -> None:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    module = Migrated(dropout=0.1)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    data = DataLoader(samples(), batch_size=8, shuffle=True)
    model, optimizer, data, scheduler = accelerator.prepare(module.model, optimizer, data, scheduler)
    for _ in range(3):
        for x, labels in data:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x - 1), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
