"""What a comparison trains: every combination of its axes, each checked before the first run starts; no torch."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from cifar_zero.config import command_line
from cifar_zero.config.flags import Config
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.core.errors import UsageError
from cifar_zero.training.resolve import resolve

PERTURBED = "perturbed-"
"""How the names of perturbed runs begin."""


@dataclass
class Planned:
    """A variant to train, with a run for each seed."""

    name: str
    run: Run
    """Of its first seed."""
    flags: list[str]
    """For train.py, without --seed, --out and --name."""
    seeds: range

    @property
    def command(self) -> str:
        """Trains its first seed again."""
        return f"python train.py {shlex.join(self.flags_of(self.seeds[0]))}"

    def flags_of(self, seed: int) -> list[str]:
        """For train.py, without --out and --name."""
        return [*self.flags, "--seed", str(seed)]

    def run_name(self, seed: int) -> str:
        """The name of a run, and so of its folder and of its curves."""
        return self.name.replace(", ", "-").replace(" ", "_") + f"-seed_{seed}" * (len(self.seeds) > 1)


def plan(
    strategies: Sequence[str], devices: Sequence[str], accumulate: Sequence[str], seeds: int, rest: Sequence[str]
) -> list[Planned]:
    """The variants, the reference first: baseline if it is one of the strategies, else the first value of each axis.

    Args:
        strategies: names, or raw DeepSpeed configurations (*.json); empty: train.py's default.
        devices: values of --devices; empty likewise.
        accumulate: values of --accumulate; empty likewise.
        seeds: how many, from the --seed in `rest` on.
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
    """The strategy, the ranks and the micro-batches, as far as the variants have several of them."""
    parts = (
        strategy,
        "1 rank" if ranks == 1 else f"{ranks} ranks",
        "1 micro-batch" if accumulate == 1 else f"{accumulate} micro-batches",
    )
    return ", ".join(part for part, varies in zip(parts, several, strict=True) if varies) or strategy


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
