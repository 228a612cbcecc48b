"""The variants of a comparison: to train, each checked before the first run starts, or groups of existing runs."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from cifar_zero.checkpoints import run_folder
from cifar_zero.comparison import result
from cifar_zero.comparison.result import Variant
from cifar_zero.comparison.settings import shared
from cifar_zero.config import command_line
from cifar_zero.config.flags import Config
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.core.errors import UsageError
from cifar_zero.training.resolve import resolve

PERTURBED = "perturbed-"
"""Prefix of the names of perturbed runs."""

SHAPE = ("strategy", "world_size", "accumulate")
"""Keys of metrics.json that define a variant."""

NO_DIFFERENCE = ("out", "name", "logger", "hparams", "seed")
"""Options in which the runs of one variant may differ."""


@dataclass
class Planned:
    """A variant to train, with a run for each seed."""

    name: str
    run: Run
    """The run of its first seed."""
    flags: list[str]
    """Flags of train.py, without --seed, --out and --name."""
    seeds: range

    @property
    def command(self) -> str:
        """The command that repeats the run of the first seed."""
        return f"python train.py {shlex.join(self.flags_of(self.seeds[0]))}"

    def flags_of(self, seed: int) -> list[str]:
        """Returns the flags of train.py, without --out and --name."""
        return [*self.flags, "--seed", str(seed)]

    def run_name(self, seed: int) -> str:
        """Returns the name of a run, of its folder and of its curves."""
        return self.name.replace(", ", "-").replace(" ", "_") + f"-seed_{seed}" * (len(self.seeds) > 1)


def plan(
    strategies: Sequence[str], devices: Sequence[str], accumulate: Sequence[str], seeds: int, rest: Sequence[str]
) -> list[Planned]:
    """Returns the variants to train. The reference is first: baseline, or without it the first value of each axis.

    Args:
        strategies: names, or raw DeepSpeed configurations (*.json); empty: train.py's default.
        devices: values of --devices; empty: train.py's default.
        accumulate: values of --accumulate; empty: train.py's default.
        seeds: runs per variant, counted up from the --seed in `rest`.
        rest: flags of train.py for all variants.

    Raises:
        UsageError: a variant cannot run here, or there is nothing to compare.
    """
    if any(flag.split("=")[0] == "--strategy" for flag in rest):
        raise UsageError("--strategy is for a single run: name the strategies to compare with --strategies")
    if max(len(strategies), len(devices), len(accumulate)) < 2:
        raise UsageError("nothing to compare: give two or more --strategies, --devices or --accumulate, or --runs")
    if seeds < 1:
        raise UsageError(f"--seeds must be at least 1, not {seeds}")
    ordered = sorted(strategies, key=lambda name: name != "baseline")
    several = [len(axis) > 1 for axis in (strategies, devices, accumulate)]
    planned = []
    for strategy, ranks, parts in product(ordered or [""], devices or [""], accumulate or [""]):
        flags = _strategy_flags(strategy)
        flags += ["--devices", ranks] if ranks else []
        flags += ["--accumulate", parts] if parts else []
        planned.append(_planned([*rest, *flags], seeds, several))
    folders = [variant.run_name(variant.seeds[0]) for variant in planned]
    if len({*folders, PERTURBED + folders[0]}) <= len(folders):
        names = ", ".join(variant.name for variant in planned)
        raise UsageError(f"two variants would share a folder; give each value once and rename *.json files: {names}")
    return planned


def variant_name(strategy: str, ranks: int, accumulate: int, several: Sequence[bool]) -> str:
    """Returns the name of a variant: of strategy, ranks and micro-batches those that vary (`several`)."""
    parts = (
        strategy,
        "1 rank" if ranks == 1 else f"{ranks} ranks",
        "1 micro-batch" if accumulate == 1 else f"{accumulate} micro-batches",
    )
    return ", ".join(part for part, varies in zip(parts, several, strict=True) if varies) or strategy


def grouped(runs: Sequence[result.Run]) -> list[Variant]:
    """Returns the variants of existing runs, baseline first. Runs that differ only in the seed are one variant."""
    groups: list[list[result.Run]] = []
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


def perturbed_runs(runs: Sequence[result.Run], reference: Variant) -> list[result.Run]:
    """Returns the perturbed runs of the reference's recipe, at most one per seed."""
    found = {
        run.seed: run
        for run in runs
        if run.perturbed and run.seed in reference.by_seed and _recipe(run) == _recipe(reference.runs[0])
    }
    return [*found.values()]


def _planned(flags: list[str], seeds: int, several: Sequence[bool]) -> Planned:
    run = _resolved(flags)
    config = run.config
    name = variant_name(config.strategy_name, run.world_size, config.accumulate, several)
    planned = Planned(name, run, flags, range(config.seed, config.seed + seeds))
    _resolved(planned.flags_of(planned.seeds[-1]))
    return planned


def _resolved(flags: list[str]) -> Run:
    config = command_line.parse(flags)
    if config.only_measures or config.plot_schedule:
        raise UsageError("compare.py trains and tests: leave out --bench_steps, --find_lr and --plot_schedule")
    if config.strategy == AUTO:
        raise UsageError("--strategies auto cannot be compared: name the strategy that plan.py recommends")
    if config.resume:
        raise UsageError("compare.py trains from the start: leave out --resume")
    run = resolve(config, command_line.consent(flags))
    if run.config.num_nodes > 1:
        raise UsageError("compare.py starts ranks on one node only: leave out --num_nodes")
    return run


def _strategy_flags(strategy: str) -> list[str]:
    if strategy.endswith(".json"):
        return ["--strategy", Config.strategy, "--ds_config", strategy]
    return ["--strategy", strategy] if strategy else []


def _belongs(run: result.Run, group: Sequence[result.Run]) -> bool:
    known = any(run.seed == other.seed for other in group)
    return not known and _all(run) == _all(group[0])


def _all(run: result.Run) -> dict[str, Any]:
    asked = {key: value for key, value in run.settings.items() if key not in NO_DIFFERENCE}
    return {**asked, **_recipe(run)}


def _recipe(run: result.Run) -> dict[str, Any]:
    """Returns the shared settings, the strategy, the ranks and the micro-batches."""
    return {**shared(run), **{key: run.metrics[key] for key in SHAPE}}
