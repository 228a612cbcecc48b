"""torch's FullyShardedDataParallel through Lightning; its own check refuses anything but CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.strategies import FSDPStrategy

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from config import Config


def build(config: Config, on_cpu: bool, micro_batch_size: int, num_parameters: int) -> FSDPStrategy:
    """Parameters, gradients and optimizer state sharded over all ranks; the checkpoint is one plain file."""
    return ShapedFSDPStrategy(state_dict_type="full", use_orig_params=True)


class ShapedFSDPStrategy(FSDPStrategy):
    """Lightning's, whose parameters tell the shape that they had: torch (2.15) leaves flat pieces of them."""

    def setup(self, trainer: Trainer) -> None:
        """Shards the network."""
        assert self.model is not None
        for parameter in self.model.parameters():
            parameter.whole_shape = parameter.shape  # pyright: ignore[reportAttributeAccessIssue]
        super().setup(trainer)
