"""torch's FullyShardedDataParallel through Lightning; its own check refuses anything but CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.strategies import FSDPStrategy

if TYPE_CHECKING:
    from config import Config


def build(config: Config, on_cpu: bool, micro_batch_size: int, num_parameters: int) -> FSDPStrategy:
    """Parameters, gradients and optimizer state sharded over all ranks; the checkpoint is one plain file."""
    return FSDPStrategy(state_dict_type="full", use_orig_params=True)
