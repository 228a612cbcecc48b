"""The options of Muon with AdamW, and of Muon with SGD as in the CIFAR-10 speed records."""

from dataclasses import dataclass
from typing import Any

from cifar_zero.core.usage import limited
from cifar_zero.optimizers.options import Implementation, OptimizerOptions


@dataclass
class Muon(OptimizerOptions):
    """Muon: hidden weight matrices by orthogonalised momentum (Jordan et al. 2024), all else by AdamW"""

    lr: float = 0.001
    """Learning rate of both: Muon's steps are scaled to the size of AdamW's (Liu et al. 2025)."""

    weight_decay: float = 0.01
    """Weight decay, subtracted from the weights next to the update."""

    momentum: float = limited(0.95, below=1)
    """Decay of the running mean of the gradient, in Nesterov's form."""

    ns_steps: int = limited(5, at_least=1, below=100)  # torch.optim.Muon's limit
    """Newton-Schulz iterations that orthogonalise a matrix."""

    betas: tuple[float, float] = limited((0.9, 0.999), below=1)
    """AdamW's."""

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        """Our own under every strategy; `parameters` are groups, of which Muon's have `muon`."""
        from cifar_zero.optimizers.torch_updates import TorchMuon

        return TorchMuon(parameters, match_adamw=True, **self.torch_options())


@dataclass
class MuonSGD(OptimizerOptions):
    """Muon for filters and matrices, SGD for biases and the last layer, each with its rate (airbench94, Jordan 2024)"""

    lr: float = 0.24
    """Learning rate of Muon: length of a step, where each filter has length 1 on average."""

    weight_decay: float = 0.0
    """What SGD adds to the gradient, as a share of the weights, times the learning rate that the group begins with:
    other learning rates do not change it. Muon's weights do not decay."""

    momentum: float = limited(0.6, below=1)
    """Muon's momentum, in Nesterov's form: share of the sum of gradients that is kept."""

    ns_steps: int = limited(3, below=100)  # torch.optim.Muon's limit
    """Newton-Schulz iterations that orthogonalise Muon's steps; 0: none, the steps are only scaled to the same
    length."""

    normalize: bool = True
    """Scale Muon's weights to the length sqrt(filters) before each step, so that --optimizer.lr is an angle."""

    bias_lr: float = 100.0
    """Learning rate of SGD for biases, norms and embeddings. It applies to the mean of the loss over a batch: the
    records' 0.053, for the sum, is 106 with 2,000 images, and less with fewer."""

    head_lr: float = 1000.0
    """Learning rate of SGD for the weights of the last layer, in the same unit."""

    sgd_momentum: float = limited(0.85, below=1)
    """SGD's momentum, in Nesterov's form."""

    first_bias_share: float = limited(1.0, over=0, at_most=1)
    """Share of the training in which the first layer's bias is trained; its learning rate goes through the whole
    --schedule in that time. Below 1 it needs a schedule that ends at 0."""

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        """Our own under every strategy; the groups have SGD's learning rates and weight decay."""
        from cifar_zero.optimizers.torch_updates import TorchMuon

        options = self.torch_options()
        for name in ("bias_lr", "head_lr", "first_bias_share", "weight_decay"):
            del options[name]
        fused = implementation in ("torch_fused", "deepspeed_fused")
        return TorchMuon(parameters, fused=fused, weight_decay=0.0, schedule_share=1.0, **options)
