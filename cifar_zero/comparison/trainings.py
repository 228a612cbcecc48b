"""The variants that compare.py trains: each is checked before the first run starts, and trained; no torch."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from cifar_zero.comparison.reading import load, variant_name
from cifar_zero.comparison.result import Variant
from cifar_zero.config import command_line
from cifar_zero.config.flags import Config
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.core.console import say
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.reports.summary import REPOSITORY
from cifar_zero.training import run_process
from cifar_zero.training.resolve import resolve

TRAIN = (str(REPOSITORY / "train.py"),)
PERTURB = (str(REPOSITORY / "compare.py"), "perturb")
"""Programs that train a run and a perturbed run, with their first arguments."""

PERTURBED = "perturbed-"
"""Prefix of the names of perturbed runs."""


@dataclass
class Planned:
    """A variant to train, with a run for each seed."""

    name: str
    run: Run
    """The run of its first seed."""
    flags: list[str]
    """Flags of train.py, without --seed, --out and --name."""
    seeds: range

    def flags_of(self, seed: int) -> list[str]:
        """Returns the flags of train.py, without --out and --name."""
        return [*self.flags, "--seed", str(seed)]

    def run_name(self, seed: int) -> str:
        """Returns the name of a run, of its folder and of its curves."""
        return self.name.replace(", ", "-").replace(" ", "_") + f"-seed_{seed}" * (len(self.seeds) > 1)


@dataclass
class Runner:
    """Trains runs one after the other, each in its own process group, and leaves no process behind."""

    folder: Path
    """Of the comparison; receives the run folders and the log of each run."""
    runs: int
    """Total number of runs, for the progress."""
    started: int = 0

    def run(self, name: str, program: Sequence[str], flags: Sequence[str]) -> Path:
        """Trains one run, with TRAIN or PERTURB and flags of train.py, and returns its folder.

        Raises:
            RunError: the run failed; the message is its last error line.
            KeyboardInterrupt, Stopped: raised after the run has been ended.
        """
        self.started += 1
        log = self.folder / f"{name}.log"
        say(f"[{self.started}/{self.runs}] {name}: training, see {log}")
        child = run_process.start(program, [*flags, "--out", str(self.folder), "--name", name], log)
        try:
            child.wait()
        finally:
            run_process.end([child])
        found = run_process.folders(self.folder, name)
        if child.returncode or not found:
            error = run_process.failure(log, child.returncode)
            say(f"{name}: {error}")
            raise RunError(error)
        return found[0]

    def train(self, planned: Planned) -> Variant:
        """Trains a variant; a run that failed or cannot be read is left out, and named in `error`."""
        config = planned.run.config
        command = f"python train.py {shlex.join(planned.flags_of(planned.seeds[0]))}"
        variant = Variant(planned.name, config.strategy_name, config.world_size, config.accumulate, command)
        for seed in planned.seeds:
            try:
                variant.runs.append(load(self.run(planned.run_name(seed), TRAIN, planned.flags_of(seed))))
            except (RunError, UsageError) as error:
                variant.error = variant.error or str(error)
        return variant


def plan(
    strategies: Sequence[str], devices: Sequence[str], accumulate: Sequence[str], seeds: int, rest: Sequence[str]
) -> list[Planned]:
    """Returns the variants to train. The reference is first: baseline, or without it the first value of each axis.

    Args:
        strategies, devices, accumulate: the axes; an empty one has train.py's default.
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
        flags = [*rest, *_strategy_flags(strategy)]
        flags += ["--devices", ranks] if ranks else []
        flags += ["--accumulate", parts] if parts else []
        run = _resolved(flags)
        config = run.config
        name = variant_name(config.strategy_name, run.world_size, config.accumulate, several)
        planned.append(Planned(name, run, flags, range(config.seed, config.seed + seeds)))
        _resolved(planned[-1].flags_of(planned[-1].seeds[-1]))
    folders = [variant.run_name(variant.seeds[0]) for variant in planned]
    if len({*folders, PERTURBED + folders[0]}) <= len(folders):
        names = ", ".join(variant.name for variant in planned)
        raise UsageError(f"two variants would share a folder; give each value once and rename *.json files: {names}")
    return planned


def prepare(planned: Sequence[Planned]) -> None:
    """Checks the Trainer's options and the weights of each variant and prepares the images, before the first run."""
    from cifar_zero import data
    from cifar_zero.core.console import quieten
    from cifar_zero.training import build, starting

    quieten()
    for run in (variant.run for variant in planned):
        build.check_trainer_options(run.config)
        starting.pretrained_weights(run)
    data.prepare(planned[0].run.config.data)


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
