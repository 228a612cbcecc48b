"""Defines two small models, made of patterns that have broken strategies. Comments cite DeepSpeed's issues that report
a pattern."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepcheck.accept.cases import MICRO_BATCH, STEPS, Case

VOCABULARY, LENGTH = 97, 12

WIDTH = 37
"""Features of the hidden layers. A prime number, so that every strategy must pad its shards."""

EXPERTS = 4


class Block(nn.Module):
    """A layer whose activations are recomputed in the backward pass, with the same dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Edges(nn.Module):
    """Maps tokens (N, LENGTH) to scores (N, LENGTH, VOCABULARY). The forward passes with the numbers `without_branch`,
    from 1, leave out the layer `branch`."""

    def __init__(self, without_branch: Sequence[int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        # Frozen weights are in no partition (DeepSpeed issue 4055).
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        # The gradient of a bias before batch normalisation is nothing but rounding error.
        self.project = nn.Linear(WIDTH, WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.block = Block()
        # Used twice in a forward pass, so that one hook sees two gradients (DeepSpeed issues 8224 and 8245).
        self.twice = nn.Linear(WIDTH, WIDTH)
        # Tied weights are one tensor with two names (DeepSpeed issues 966 and 3824).
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        # Has no gradient in some micro-batches (DeepSpeed issues 545 and 1266), and the next layer never has one.
        self.branch, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.bias = nn.Linear(WIDTH, VOCABULARY)
        self.without_branch, self.passes = without_branch, 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.project(self.frozen(self.embed(tokens)))
        statistics: Any = self.batch_norm.running_mean  # engines differ in whether they convert them to bfloat16
        x = self.batch_norm(x.flatten(0, 1).to(statistics.dtype)).view_as(x).to(x.dtype)
        x = checkpoint(self.block, x, use_reentrant=False)
        for layer in (self.twice, self.first, self.twice, self.second):
            x = x + layer(F.relu(x))
        self.passes += 1
        if self.passes not in self.without_branch:
            x = x + self.branch(F.relu(x))
        return self.head(x) * self.scale + self.bias(x)


class Experts(nn.Module):
    """Maps tokens and the tokens that follow them, each (N, LENGTH), to the loss. One layer is DeepSpeed's mixture of
    experts."""

    def __init__(self, ep_size: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        # Each expert has the capacity for all tokens, because tokens beyond it are dropped at random.
        self.mixture = MoE(WIDTH, expert, EXPERTS, ep_size, capacity_factor=EXPERTS)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        mixed, imbalance, _ = self.mixture(x)
        return cross_entropy(self.head(x + mixed), targets) + 0.01 * imbalance


def build_model(case: Case) -> nn.Module:
    """Returns the model of a case, with equal weights on all ranks."""
    torch.manual_seed(case.seed)
    model: Any = Experts(case.ep_size) if case.model == "experts" else Edges(_passes_without_branch(case))
    if case.trained:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(tuple(case.trained)))
        model.batch_norm.eval()
    return model


def _passes_without_branch(case: Case) -> Sequence[int]:
    """Returns the micro-batches, counted from 1 over all steps, that leave the branch out."""
    if case.rests == "step 2":
        return range(case.accumulate + 1, 2 * case.accumulate + 1)
    if case.rests == "between":  # neither the first nor the last of a step
        return range(2, STEPS * case.accumulate + 1, case.accumulate) if case.accumulate > 2 else ()
    return range(1 if case.rests == "first" else case.accumulate, STEPS * case.accumulate + 1, case.accumulate)


def batches(case: Case, rank: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields tokens of this rank and the tokens that follow them, each int64 (MICRO_BATCH, LENGTH), without end."""
    draw = torch.Generator().manual_seed(1000 * case.seed + rank)
    while True:
        tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, LENGTH + 1), generator=draw).to(device)
        yield tokens[:, :-1], tokens[:, 1:]


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.float().flatten(0, 1), targets.flatten())
