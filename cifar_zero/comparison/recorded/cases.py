"""`cifar-zero compare --acceptance`: a few recipes that together cover each pair of settings, under every strategy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

from cifar_zero.config import command_line
from cifar_zero.config.settings import Settings
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count
from cifar_zero.training.resolve import resolve

STEPS = 12
"""Optimizer steps of a case: the first ones show a wrong gradient, the later ones a stale state or a lost update."""

PARTS = 4  # micro-batches of a step in the cases that accumulate

BATCH = 32
"""Least number of images of a step, over all ranks. It is the next multiple of PARTS x ranks, and two steps see all
images: so few that a model learns them by heart within the steps."""

CLIP = 0.5  # norm to which the gradients are clipped; those of all models are larger

OPTIMIZERS = {
    # SGD hides no wrong scale of the gradient, as Adam does.
    "sgd": ["--optimizer", "sgd", "--optimizer.lr", "0.02"],
    # With two parameter groups: matrices decay, so strongly that a decay of the wrong group shows next to Adam's step.
    "adamw": ["--optimizer", "adamw", "--optimizer.lr", "0.005", "--optimizer.weight_decay", "0.5"],
}

MODELS = {
    "net": ["--model", "net", "--init", "he"],
    "torture": ["--model", "torture"],
    # With places for every image in every expert none is dropped: dropping is random.
    "net_moe": [*("--model", "net_moe", "--init", "he"), "--model.num_experts", "[4]", "--model.capacity_factor", "4"],
}

COMMON = [
    *("--data.source", "synthetic", "--data.val_fraction", "0", "--max_steps", str(STEPS), "--epochs", str(STEPS)),
    # Each step has another learning rate, and the first one moves the weights.
    *("--schedule", "exponential", "--schedule.gamma", "0.85"),
]

RAW = [*map(str, sorted(Path(__file__).parent.glob("*.json")))]
"""DeepSpeed configurations with options that no strategy has, and that releases have had wrong in silence (DeepSpeed
pull requests 7985 and 8158)."""

WITHOUT = ("baseline", "fsdp", "tensor_parallel", "pipeline")
"""Strategies without cases: the reference, another name of fsdp2, and those that train only vision transformers."""

QUICK_RECIPES = 2  # recipes of --quick: the first ones, which cover the most

RECIPE = {
    "steps": str(STEPS),
    "batch_size": f"{BATCH}, or the next multiple of {PARTS} x ranks",
    "images": "two batches of noise, learnt by heart",
}
"""What all cases share, for the report."""


@dataclass(frozen=True)
class Job:
    """A training; several cases may share one."""

    ranks: int
    flags: tuple[str, ...]  # of cifar-zero train; with --module, of a user's own LightningModule
    perturbed: int = 0  # 1 or -1: its initial weights change by about one rounding error, in that direction
    repeats: bool = False  # whether it only repeats another, to show whether that is deterministic


@dataclass(frozen=True)
class Case:
    """A training to judge, and the training of its reference."""

    name: str
    strategy: str
    accumulate: int
    precision: str
    ours: Job
    reference: Job
    must_learn: bool = True  # whether the loss must fall

    @property
    def jobs(self) -> list[Job]:
        """The trainings that a verdict needs, the reference first and its own last. Where rounding decides which of two
        nearly equal numbers is the larger, in a ReLU or a max-pool, the gradient jumps: of two opposite perturbations
        one decides otherwise, so that the bounds know the jump."""
        repeated = [] if self.must_learn else [replace(self.reference, repeats=True)]
        perturbed = [replace(self.reference, perturbed=sign) for sign in (1, -1)]
        return [self.reference, *perturbed, *repeated, self.ours]


def plan_cases(strategies: Sequence[str], ranks: int, quick: bool, seeds: int = 1) -> list[Case]:
    """Returns the cases of this machine, those of one number of ranks and recipe next to each other.

    Strategies are names or raw DeepSpeed configurations, by default all that can train here; `ranks` is the largest
    number of ranks; `quick` takes only the first QUICK_RECIPES; each case is trained with so many `seeds`. Raises
    UsageError: a strategy is unknown, or none of its cases can train on `ranks` here.
    """
    for name in strategies:
        command_line.parse(command_line.strategy_flags(name))  # refuses an unknown name, and says which is meant
    precisions = ("32-true", "bf16-mixed", "16-mixed") if gpu_count() else ("32-true", "bf16-mixed")
    rows = recipes(ranks, precisions)[: QUICK_RECIPES if quick else None]
    names = strategies or [*(name for name in STRATEGIES if name not in WITHOUT), *RAW]
    cases: dict[Case, None] = {}
    refused: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: -row["ranks"]):
        for name in (name for name in names if name not in RAW or row in rows[:QUICK_RECIPES]):
            for tried in (row, {**row, "model": "torture"}, {**row, "model": "net"}):
                if not (reason := refusal(name, tried)):
                    cases |= {case_of(name, {**tried, "seed": seed}): None for seed in range(seeds)}
                    break
                if row["ranks"] == ranks:
                    refused[name] = reason
    here = [name for name in names if any(name in case.ours.flags for case in cases)]
    for name in strategies or here or names:
        if not any(name in case.ours.flags and case.ours.ranks == ranks for case in cases):
            raise UsageError(f"--strategies {name}: no case on {ranks} ranks: {refused[name]}")
    return [*cases]


def refusal(strategy: str, row: Mapping[str, Any]) -> str:
    """Returns why a recipe cannot be trained here under a strategy; empty if it can."""
    if strategy == "baseline":
        return "it is the reference of the acceptance"
    if strategy == "ddp" and row["model"] != "net":
        return "its reference is one process with other micro-batches, on which batch norm and balanced experts depend"
    named = strategy in STRATEGIES
    try:
        recipe = _recipe(case_of("baseline" if named else strategy, row).ours.flags)
        resolve(recipe.changed(strategy=strategy) if named else recipe)
    except UsageError as error:
        return str(error)
    return ""


@cache
def _recipe(flags: tuple[str, ...]) -> Settings:
    return command_line.parse([*flags])


def case_of(strategy: str, row: Mapping[str, Any]) -> Case:
    """Returns the case of a recipe, see `recipes`, under a strategy or a raw DeepSpeed configuration. Its reference is
    the same recipe in plain PyTorch: on one rank the baseline, on several DDP; DDP's is the baseline."""
    pieces = PARTS * row["ranks"]
    row = {**row, "batch": pieces * math.ceil(BATCH / pieces)}
    name = Path(strategy).stem
    clip = f"clip {row['clip']:g}" if row["clip"] else "no clipping"
    ranks = "1 rank" if row["ranks"] == 1 else f"{row['ranks']} ranks"
    parts = (name, row["model"], row["optimizer"], row["precision"], ranks, f"accumulate {row['accumulate']}", clip)
    parts += (f"seed {row['seed']}",) if row.get("seed") else ()
    if strategy == "ddp":
        reference = _job("baseline", {**row, "ranks": 1, "accumulate": 1})
    else:
        reference = _job("baseline" if row["ranks"] == 1 else "ddp", row)
    return Case(", ".join(parts), name, row["accumulate"], row["precision"], _job(strategy, row), reference)


def _job(strategy: str, row: Mapping[str, Any]) -> Job:
    flags = [*COMMON, *command_line.strategy_flags(strategy), "--devices", str(row["ranks"])]
    flags += ["--batch_size", str(row["batch"]), "--data.synthetic_size", str(2 * row["batch"])]
    flags += ["--accumulate", str(row["accumulate"]), "--gradient_clip_val", str(row["clip"])]
    flags += ["--precision", row["precision"], "--seed", str(row.get("seed", 0))]
    flags += [*OPTIMIZERS[row["optimizer"]], *MODELS[row["model"]]]
    if row["model"] == "torture" and row["accumulate"] > 1:
        flags += ["--model.unused", "true"]
    return Job(row["ranks"], tuple(flags))


def recipes(ranks: int, precisions: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the settings of the cases but for the strategy: rows in which each pair of settings occurs.

    Pairwise testing by the greedy method of AETG (Cohen et al. 1997). The first row is the one that most known bugs
    need. The second clips on all ranks with SGD, in a low precision: Adam would hide the norm of one shard. In the
    third, norms that are not zero do not decay. Mixtures of experts train in float32: a low precision sends images to
    other experts, which is no error. `ranks` is the largest number of ranks.
    """
    factors: dict[str, Sequence[Any]] = {
        "ranks": sorted({ranks, 1}, reverse=True),
        "accumulate": (PARTS, 1),
        "precision": precisions,
        "optimizer": [*OPTIMIZERS],
        "clip": (0.0, CLIP),
        "model": [*MODELS],
    }
    every = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    every = [row for row in every if row["model"] != "net_moe" or row["precision"] == "32-true"]
    left = set().union(*map(_pairs, every))
    several = {**every[0], "model": "torture"}
    rows = [
        several,
        {**every[0], "accumulate": 1, "precision": precisions[1], "clip": CLIP},
        {**several, "accumulate": 1, "optimizer": "adamw"},
    ]
    left -= _pairs(rows[0]) | _pairs(rows[1])
    while left := left - _pairs(rows[-1]):
        rows.append(max(every, key=lambda row: len(left & _pairs(row))))
    return rows


def _pairs(row: Mapping[str, Any]) -> set[Any]:
    return {*combinations(row.items(), 2)}
