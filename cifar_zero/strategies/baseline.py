"""Plain PyTorch: one device, or torch's DistributedDataParallel where there are several."""

import inspect
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

from cifar_zero.config.placement import Placement


def build(placement: Placement) -> Strategy | str:
    """Returns Lightning's DDP for several ranks or if it is named, else its strategy for a single device."""
    if placement.strategy == "baseline" and placement.world_size == 1:
        return "auto"
    # callbacks/averaging.py averages the only buffers that change, batch normalisation's, under every strategy.
    known = inspect.signature(DistributedDataParallel).parameters  # torch 2.15 has renamed it
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {sync_buffers: False}
    return DDPStrategy(
        process_group_backend="gloo" if placement.on_cpu else None, gradient_as_bucket_view=True, **options
    )
