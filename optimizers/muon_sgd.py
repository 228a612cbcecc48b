"""Muon beside SGD, as in the CIFAR-10 speed records."""

# No postponed annotations here: jsonargparse would execute the TYPE_CHECKING imports, torch, to resolve them.
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimizers.options import Decayed, Implementation
from ranges import check_range

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class MuonSGD:
    """Muon for filters and matrices, SGD for biases and the last layer, each with its rate (airbench94, Jordan 2024)"""

    lr: float = 0.24
    """Learning rate of Muon: length of a step, where each filter has length 1 on average."""

    momentum: float = 0.6
    """Of Muon, in Nesterov's form: share of the sum of gradients that is kept."""

    ns_steps: int = 3
    """Newton-Schulz iterations that orthogonalise Muon's steps; 0: none, steps have the length that they would have."""

    normalize: bool = True
    """Bring Muon's weights to the length sqrt(filters) before each step, so that --optimizer.lr is an angle."""

    bias_lr: float = 100.0
    """Learning rate of SGD for biases, norms and embeddings. It is for the mean of the loss over a batch: the records'
    0.053, for its sum, is 106 with 2,000 images, and less with fewer of them."""

    head_lr: float = 1000.0
    """Learning rate of SGD for the weights of the last layer, in the same unit."""

    sgd_momentum: float = 0.85
    """Of SGD, in Nesterov's form."""

    first_bias_share: float = 1.0
    """Share of the training in which the first layer's bias is trained; its learning rate goes through the whole
    --schedule in that time. Under 1 with a schedule that ends at 0."""

    weight_decay: float = 0.0
    """What SGD adds to the gradient, as a share of the weights, times the learning rate that the group begins with:
    other learning rates do not change it. Muon's weights do not decay."""

    weight_decay_on: Decayed = "matrices"
    """What the weight decay is for. matrices: weights of two and more dimensions, no biases and norms. all: all."""

    def __post_init__(self) -> None:
        for name in ("lr", "bias_lr", "head_lr", "weight_decay"):
            check_range(name, getattr(self, name))
        for name in ("momentum", "sgd_momentum"):
            check_range(name, getattr(self, name), below=1)
        if not 0 <= self.ns_steps < 100:  # torch.optim.Muon's limit
            raise ValueError(f"ns_steps must be from 0 to 99, not {self.ns_steps}")
        if not 0 < self.first_bias_share <= 1:
            raise ValueError(f"first_bias_share must be over 0 and at most 1, not {self.first_bias_share}")

    def build(self, parameters: Any, implementation: Implementation) -> "Optimizer":
        """Ours, whatever the strategy; `parameters` are groups that say which is whose (optimizers/groups.py)."""
        from optimizers.torch_muon_sgd import TorchMuonSGD

        return TorchMuonSGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            ns_steps=self.ns_steps,
            normalize=self.normalize,
            sgd_momentum=self.sgd_momentum,
            fused=implementation in ("torch_fused", "deepspeed_fused"),
        )
