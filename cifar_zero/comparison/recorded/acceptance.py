"""`compare.py --acceptance`: short trainings of many settings under every strategy, for a new machine or release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from cifar_zero.comparison.recorded.cases import BATCH, IMAGES, RAW, STEPS, Case, case_of, recipes
from cifar_zero.config import command_line
from cifar_zero.config.flags import Config
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count
from cifar_zero.training.resolve import resolve

WITHOUT = ("baseline", "fsdp", "tensor_parallel", "pipeline")
"""Strategies without cases: the reference, another name of fsdp2, and those that train only vision transformers."""

QUICK_RECIPES = 2
"""Recipes of --quick: the first ones, which cover the most."""

CPU_RANKS = 2

RECIPE = {"steps": str(STEPS), "batch_size": str(BATCH), "images": f"{IMAGES} of noise, learnt by heart"}
"""What all cases share, for the report."""


def plan_cases(strategies: Sequence[str], ranks: int, quick: bool, seeds: int = 1) -> list[Case]:
    """Returns the cases of this machine, those of one number of ranks and recipe next to each other.

    Args:
        strategies: names, or raw DeepSpeed configurations; empty: all that can train here.
        ranks: the largest number of ranks; 0: one for each GPU, or two on the CPU.
        quick: whether to leave out most recipes.
        seeds: trainings of each case, with other initial weights and images.

    Raises:
        UsageError: a strategy is unknown, or has no case here.
    """
    gpus = gpu_count()
    ranks = ranks or gpus or CPU_RANKS
    for name in strategies:
        command_line.parse(command_line.choosing(name))  # refuses an unknown name, and says which is meant
    precisions = ("32-true", "bf16-mixed", "16-mixed") if gpus else ("32-true", "bf16-mixed")
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
                refused[name] = reason
    for name in strategies:
        if not any(name in case.ours.flags for case in cases):
            raise UsageError(f"--strategies {name}: {refused[name]}")
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
        resolve(replace(recipe, strategy=strategy) if named else recipe)
    except UsageError as error:
        return str(error)
    return ""


@cache
def _recipe(flags: tuple[str, ...]) -> Config:
    return command_line.parse([*flags])
