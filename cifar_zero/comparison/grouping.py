"""Which of the runs given with --runs make a variant, and which are perturbed runs of the reference."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cifar_zero.checkpoints import run_folder
from cifar_zero.comparison.result import Run, Variant
from cifar_zero.comparison.settings import shared
from cifar_zero.comparison.variants import variant_name

SHAPE = ("strategy", "world_size", "accumulate")
"""Keys of metrics.json that make a variant."""

NO_DIFFERENCE = ("out", "name", "logger", "hparams", "seed")
"""Options in which the runs of one variant may differ."""


def grouped(runs: Sequence[Run]) -> list[Variant]:
    """The variants, baseline first: runs that differ in the seed alone are one. Perturbed runs are left out."""
    groups: list[list[Run]] = []
    for run in (run for run in runs if not run.perturbed):
        same = (group for group in groups if _belongs(run, group))
        group = next(same, [])
        if not group:
            groups.append(group)
        group.append(run)
    several = [len({group[0].metrics[key] for group in groups}) > 1 for key in SHAPE]
    variants: list[Variant] = []
    for group in groups:
        strategy, ranks, accumulate = (group[0].metrics[key] for key in SHAPE)
        name, folder = variant_name(strategy, ranks, accumulate, several), group[0].folder
        name += f" ({folder})" * any(other.name == name for other in variants)
        command = f"python train.py --config {shlex.quote(str(Path(folder, run_folder.CONFIG)))}"
        variants.append(Variant(name, strategy, ranks, accumulate, command, group))
    return sorted(variants, key=lambda variant: variant.strategy != "baseline")


def perturbed_runs(runs: Sequence[Run], reference: Variant) -> list[Run]:
    """The perturbed runs of the reference's recipe, at most one for each of its seeds."""
    found = {
        run.seed: run
        for run in runs
        if run.perturbed and run.seed in reference.by_seed and _recipe(run) == _recipe(reference.runs[0])
    }
    return [*found.values()]


def _belongs(run: Run, group: Sequence[Run]) -> bool:
    known = any(run.seed == other.seed for other in group)
    return not known and _all(run) == _all(group[0])


def _all(run: Run) -> dict[str, Any]:
    asked = {key: value for key, value in run.settings.items() if key not in NO_DIFFERENCE}
    return {**asked, **_recipe(run)}


def _recipe(run: Run) -> dict[str, Any]:
    """The shared settings, the strategy, the ranks and the micro-batches."""
    return {**shared(run), **{key: run.metrics[key] for key in SHAPE}}
