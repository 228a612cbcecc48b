"""Lion."""

from dataclasses import dataclass
from typing import Any

from cifar_zero.core.ranges import check_range
from cifar_zero.optimizers.options import Decay, Implementation, torch_options


@dataclass
class Lion(Decay):
    """Lion: steps of one size, in the direction of the momentum's signs (Chen et al. 2023)"""

    lr: float = 1e-4
    """Learning rate; a third to a tenth of AdamW's."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Share of the momentum in the update's direction, and decay of the momentum itself."""

    weight_decay: float = 0.0
    """Weight decay, taken from the weights beside the update; three to ten times AdamW's."""

    def __post_init__(self) -> None:
        check_range(self, "lr", "weight_decay")
        check_range(self, "betas", below=1)

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        """A plain one of our own whatever the strategy: torch (2.15) has none.

        DeepSpeed's (0.19.8, csrc/lion) know no sign of 0 but 1 or -1: a weight without a gradient, behind a dead ReLU
        for instance, wanders off by the learning rate in each step.
        """
        from cifar_zero.optimizers.torch_updates import TorchLion

        return TorchLion(parameters, **torch_options(self))
