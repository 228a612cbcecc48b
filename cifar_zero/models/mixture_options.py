"""The options of a mixture of experts; plain Python, for the command line."""

# No postponed annotations here: jsonargparse would execute the TYPE_CHECKING imports, torch, to resolve them.
from dataclasses import dataclass, field
from typing import Literal

from cifar_zero.core.usage import Options, limited


@dataclass
class MixtureOptions(Options):
    """The options of all mixtures of a model."""

    num_experts: list[int] = field(default_factory=lambda: [2])
    """Experts of each mixture, a number for each; different ones make a pyramid (PR-MoE with mlp_type residual)."""

    ep_size: int = limited(1, at_least=1)
    """Ranks over which the experts of a mixture are distributed; needs DeepSpeed's stages 0 to 2. 1: every rank holds
    all experts."""

    mlp_type: Literal["standard", "residual"] = "standard"
    """residual: a dense network next to the experts processes every token, and the shares of both are learnt."""

    top_k: Literal[1, 2] = 1
    """Experts per token."""

    capacity_factor: float = limited(1.0, over=0)
    """Most tokens of a micro-batch for an expert in training, as a multiple of its even share; others are dropped."""

    eval_capacity_factor: float = 0.0
    """The same in evaluation, where the last are dropped; 0: none are, so that images do not affect each other."""

    min_capacity: int = 0
    """Lower bound of an expert's capacity, in tokens."""

    noisy_gate_policy: Literal["none", "RSample", "Jitter"] = "none"
    """Noise of the gate in training. RSample: experts are drawn with the gate's probabilities (top_k 1 only). Jitter:
    the gate's input is multiplied by random numbers close to 1."""

    load_balance: float = 0.01
    """Weight of the load-balancing loss, 1 for a mixture with even load; 0: no such loss, as in DeepSpeedExamples."""

    def __post_init__(self) -> None:
        if not self.num_experts or min(self.num_experts) < 1:
            raise ValueError(f"num_experts must be numbers from 1, one for each mixture, not {self.num_experts}")
        super().__post_init__()
        for number in self.num_experts:
            if number % self.ep_size:
                raise ValueError(f"ep_size {self.ep_size} does not divide num_experts {number}")
            if number < self.top_k:
                raise ValueError(f"top_k {self.top_k} needs at least as many experts: num_experts has {number}")
        if self.top_k == 2 and self.noisy_gate_policy == "RSample":
            raise ValueError("noisy_gate_policy RSample is for top_k 1 only: use Jitter with top_k 2")
