"""Muon beside AdamW, and beside SGD as in the CIFAR-10 speed records."""

from dataclasses import dataclass
from typing import Any

from cifar_zero.core.ranges import check_range
from cifar_zero.optimizers.options import Decay, Implementation, torch_options


@dataclass
class Muon(Decay):
    """Muon: hidden weight matrices by orthogonalised momentum (Jordan et al. 2024), all else by AdamW"""

    lr: float = 0.001
    """Learning rate of both: Muon's steps are scaled to the size of AdamW's (Liu et al. 2025)."""

    momentum: float = 0.95
    """Decay of the running mean of the gradient, in Nesterov's form."""

    ns_steps: int = 5
    """Newton-Schulz iterations that orthogonalise a matrix."""

    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""

    weight_decay: float = 0.01
    """Weight decay, taken from the weights beside the update."""

    def __post_init__(self) -> None:
        check_range(self, "lr", "weight_decay")
        check_range(self, "momentum", "betas", below=1)
        check_range(self, "ns_steps", at_least=1, below=100)  # torch.optim.Muon's limit

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        """Ours, whatever the strategy; `parameters` are groups that say which is whose (optimizers/groups.py)."""
        from cifar_zero.optimizers.torch_muon import TorchMuon

        return TorchMuon(parameters, match_adamw=True, **torch_options(self))


@dataclass
class MuonSGD(Decay):
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

    def __post_init__(self) -> None:
        check_range(self, "lr", "bias_lr", "head_lr", "weight_decay")
        check_range(self, "momentum", "sgd_momentum", below=1)
        check_range(self, "ns_steps", below=100)  # torch.optim.Muon's limit
        check_range(self, "first_bias_share", over=0, at_most=1)

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        """Ours, as of `Muon`; the weight decay is the groups'."""
        from cifar_zero.optimizers.torch_muon import TorchMuon

        return TorchMuon(
            parameters,
            fused=implementation in ("torch_fused", "deepspeed_fused"),
            lr=self.lr,
            momentum=self.momentum,
            ns_steps=self.ns_steps,
            normalize=self.normalize,
            sgd_momentum=self.sgd_momentum,
            weight_decay=0.0,
            schedule_share=1.0,
        )
