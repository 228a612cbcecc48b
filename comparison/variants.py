"""What a comparison trains: the combinations of its axes, each checked before the first of them starts; no torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import checks
import cli
from config import Config
from errors import UsageError
from strategies import AUTO

ROUNDING = "rounding-"
"""What the name of the run begins with that comparison.rounding makes: the reference's, moved by little."""


@dataclass
class Training:
    """One run that is to be made."""

    seed: int
    name: str
    """Of the run, and so of its folder and of its curves."""
    flags: list[str]
    """Of train.py, less --out and --name."""
    config: Config
    """Settled."""


@dataclass
class Planned:
    """One variant before it is trained, with a training for each seed."""

    name: str
    trainings: list[Training]

    @property
    def folder(self) -> str:
        """Of its runs, less the seed."""
        return self.name.replace(", ", "-").replace(" ", "_")

    @property
    def command(self) -> str:
        """That trains the first of its seeds again."""
        return f"python train.py {shlex.join(self.trainings[0].flags)}"


def plan(
    strategies: Sequence[str], devices: Sequence[str], accumulate: Sequence[str], seeds: int, rest: Sequence[str]
) -> list[Planned]:
    """The variants, the reference first: baseline where it is one of the strategies, else the first of each axis.

    Args:
        strategies: names, or raw DeepSpeed configurations (*.json); empty where the rest decides.
        devices: values of --devices; empty alike.
        accumulate: values of --accumulate; empty alike.
        seeds: how many, from the --seed of the rest on.
        rest: flags of train.py that all variants share.

    Raises:
        UsageError: one of them cannot run here, or there is nothing to compare.
    """
    for axis, values in (("strategies", strategies), ("devices", devices), ("accumulate", accumulate)):
        if len({*values}) < len(values):
            raise UsageError(f"--{axis} names one twice: {' '.join(values)}")
    if any(flag.split("=")[0] == "--strategy" for flag in rest):
        raise UsageError("--strategy is for a single run: name those to compare with --strategies")
    if max(len(strategies), len(devices), len(accumulate)) < 2:
        raise UsageError("nothing to compare: give two or more --strategies, --devices or --accumulate, or --runs")
    if seeds < 1:
        raise UsageError(f"--seeds must be at least 1, not {seeds}")
    ordered = sorted(strategies, key=lambda name: name != "baseline")
    several = [len(axis) > 1 for axis in (strategies, devices, accumulate)]
    planned = []
    for strategy, ranks, parts in product(ordered or [""], devices or [""], accumulate or [""]):
        own = _strategy_flags(strategy)
        own += ["--devices", ranks] if ranks else []
        own += ["--accumulate", parts] if parts else []
        planned.append(_planned([*rest, *own], seeds, several))
    # Of the reference's name is the second run that shows what rounding does.
    folders = [ROUNDING + planned[0].folder, *(variant.folder for variant in planned)]
    if len({*folders}) < len(folders):
        names = ", ".join(variant.name for variant in planned)
        raise UsageError(f"two variants would share a folder, give no value twice and *.json other names: {names}")
    return planned


def variant_name(strategy: str, ranks: int, accumulate: int, several: Sequence[bool]) -> str:
    """The strategy, the ranks and the micro-batches, of each of which there are several or not."""
    parts = (
        strategy,
        "1 rank" if ranks == 1 else f"{ranks} ranks",
        "1 micro-batch" if accumulate == 1 else f"{accumulate} micro-batches",
    )
    return ", ".join(part for part, varies in zip(parts, several, strict=True) if varies) or strategy


def _planned(flags: list[str], seeds: int, several: Sequence[bool]) -> Planned:
    first = _config(flags)
    name = variant_name(first.strategy_name, first.world_size, first.accumulate, several)
    planned = Planned(name, [])
    for seed in range(first.seed, first.seed + seeds):
        own = [*flags, "--seed", str(seed)]
        run = planned.folder + f"-seed_{seed}" * (seeds > 1)
        planned.trainings.append(Training(seed, run, own, _config(own)))
    return planned


def _config(flags: list[str]) -> Config:
    config = cli.parse(flags)
    if config.only_measures or config.plot_schedule:
        raise UsageError("compare.py trains and tests: leave out --bench_steps, --find_lr and --plot_schedule")
    if config.strategy == AUTO:
        raise UsageError("--strategies auto: plan.py says which one that is, name it")
    if config.resume:
        raise UsageError("compare.py trains from the start: leave --resume out")
    checks.settle(config)
    if config.num_nodes > 1:
        raise UsageError("compare.py starts the ranks of one machine: leave --num_nodes out")
    return config


def _strategy_flags(strategy: str) -> list[str]:
    if strategy.endswith(".json"):
        return ["--strategy", Config.strategy, "--ds_config", strategy]
    return ["--strategy", strategy] if strategy else []
