"""The cases of the acceptance: a few recipes that together cover each pair of settings, under every strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

STEPS = 12
"""Optimizer steps of a case: the first ones show a wrong gradient, the later ones a stale state or a lost update."""

BATCH, IMAGES = 32, 64
"""Images of a step over all ranks, and in all: so few that a model learns them by heart within the steps."""

CLIP = 0.5
"""Norm to which the gradients are clipped; those of all models are larger."""

OPTIMIZERS = {
    # SGD hides no wrong scale of the gradient, as Adam does.
    "sgd": ["--optimizer", "sgd", "--optimizer.lr", "0.02"],
    # With two parameter groups: matrices decay.
    "adamw": ["--optimizer", "adamw", "--optimizer.lr", "0.005"],
}

MODELS = {
    "net": ["--model", "net", "--init", "he"],
    "torture": ["--model", "torture"],
    # With places for every image in every expert none is dropped: dropping is random.
    "net_moe": [*("--model", "net_moe", "--init", "he"), "--model.num_experts", "[4]", "--model.capacity_factor", "4"],
}

COMMON = [
    *("--data.source", "synthetic", "--data.synthetic_size", str(IMAGES), "--data.val_fraction", "0"),
    *("--batch_size", str(BATCH), "--max_steps", str(STEPS), "--epochs", str(STEPS)),
    *("--schedule", "warmup_cosine", "--schedule.warmup_steps", "2"),
]


@dataclass(frozen=True)
class Case:
    """One training of the acceptance."""

    strategy: str
    ranks: int
    accumulate: int
    precision: str
    optimizer: str
    clip: float
    model: str

    @property
    def name(self) -> str:
        """The settings in a line, and the name of its files."""
        clip = f"clip {self.clip:g}" if self.clip else "no clipping"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        parts = (
            self.strategy,
            self.model,
            self.optimizer,
            self.precision,
            ranks,
            f"accumulate {self.accumulate}",
            clip,
        )
        return ", ".join(parts)

    @property
    def flags(self) -> list[str]:
        """The flags of train.py."""
        flags = [*COMMON, "--strategy", self.strategy, "--devices", str(self.ranks), "--precision", self.precision]
        flags += ["--accumulate", str(self.accumulate), "--gradient_clip_val", str(self.clip)]
        flags += [*OPTIMIZERS[self.optimizer], *MODELS[self.model]]
        if self.model == "torture" and self.accumulate > 1:
            flags += ["--model.unused", "true"]
        return flags

    @property
    def reference(self) -> Case:
        """The same recipe in plain PyTorch: on one rank the baseline, on several DDP, and DDP's own is the baseline."""
        if self.strategy == "ddp":
            return replace(self, strategy="baseline", ranks=1, accumulate=1)
        return replace(self, strategy="baseline" if self.ranks == 1 else "ddp")


def recipes(ranks: int, precisions: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the settings of the cases but for the strategy: rows in which each pair of settings occurs.

    Pairwise testing by the greedy method of AETG (Cohen et al. 1997). The first row is the one that most known bugs
    need. Mixtures of experts train in float32: a low precision sends images to other experts, which is no error.

    Args:
        ranks: the largest number of ranks.
        precisions: of --precision.
    """
    factors: dict[str, Sequence[Any]] = {
        "ranks": sorted({ranks, 1}, reverse=True),
        "accumulate": (4, 1),
        "precision": precisions,
        "optimizer": [*OPTIMIZERS],
        "clip": (0.0, CLIP),
        "model": [*MODELS],
    }
    every = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    every = [row for row in every if row["model"] != "net_moe" or row["precision"] == "32-true"]
    left = set().union(*map(_pairs, every))
    rows = [{**every[0], "model": "torture"}]
    while left := left - _pairs(rows[-1]):
        rows.append(max(every, key=lambda row: len(left & _pairs(row))))
    return rows


def _pairs(row: Mapping[str, Any]) -> set[Any]:
    return {*combinations(row.items(), 2)}
