"""Plain PyTorch: one device, or torch's DistributedDataParallel where there are several."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from cifar_zero.config.run import Run


def build(run: Run, num_parameters: int) -> Strategy | str:
    """Lightning's DDP for several ranks or by its name, else its strategy for a single device."""
    if run.config.strategy == "baseline" and run.world_size == 1:
        return "auto"
    # The one kind of buffers that changes, batch normalisation's, is callbacks/batch_norm.py's, under every strategy.
    known = inspect.signature(DistributedDataParallel).parameters  # torch 2.15 has another name for it
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {sync_buffers: False}
    return DDPStrategy(process_group_backend="gloo" if run.on_cpu else None, gradient_as_bucket_view=True, **options)
