"""Lion."""

# No postponed annotations here: jsonargparse would execute the TYPE_CHECKING imports, torch, to resolve them.
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimizers.options import Decayed, Implementation
from ranges import check_range

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class Lion:
    """Lion: steps of one size, in the direction of the momentum's signs (Chen et al. 2023)"""

    lr: float = 1e-4
    """Learning rate; a third to a tenth of AdamW's."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Share of the momentum in the update's direction, and decay of the momentum itself."""

    weight_decay: float = 0.0
    """Weight decay, taken from the weights beside the update; three to ten times AdamW's."""

    weight_decay_on: Decayed = "matrices"
    """What the weight decay is for. matrices: weights of two and more dimensions, no biases and norms. all: all."""

    def __post_init__(self) -> None:
        check_range("lr", self.lr)
        for beta in self.betas:
            check_range("betas", beta, below=1)
        check_range("weight_decay", self.weight_decay)

    def build(self, parameters: Any, implementation: Implementation) -> "Optimizer":
        """A plain one of our own whatever the strategy: torch (2.15) has none.

        DeepSpeed's (0.19.8, csrc/lion) know no sign of 0 but 1 or -1: a weight without a gradient, behind a dead ReLU
        for instance, wanders off by the learning rate in each step.
        """
        from optimizers.torch_lion import TorchLion

        return TorchLion(parameters, lr=self.lr, betas=(self.betas[0], self.betas[1]), weight_decay=self.weight_decay)
