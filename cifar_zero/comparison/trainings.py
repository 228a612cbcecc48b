"""The variants that cifar-zero compare trains: each is checked before the first run starts, and trained; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from cifar_zero.comparison.reading import load, variant_names
from cifar_zero.comparison.result import Variant
from cifar_zero.config import command_line, ds_config
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import AUTO, STRATEGIES
from cifar_zero.core.console import command, quieten, say
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.training import run_process
from cifar_zero.training.resolve import resolve, warn_of_few_cores

CHECKED_STEPS = 20
"""Optimizer steps of each training that are checked in place unless --check_steps is given, spread over all of them."""


@dataclass
class Planned:
    """A variant to train, with a run for each seed."""

    run: Run  # the run of its first seed
    flags: list[str]  # flags of train, without --seed, --out and --name
    seeds: range
    name: str = ""
    launcher: Sequence[str] = ()  # see `run_process.start`

    def flags_of(self, seed: int) -> list[str]:
        """Returns the flags of train, without --out and --name."""
        return [*self.flags, "--seed", str(seed)]

    def run_name(self, seed: int) -> str:
        """Returns the name of a run, of its folder and of its curves."""
        return self.name.replace(", ", "-").replace(" ", "_") + f"-seed_{seed}" * (len(self.seeds) > 1)


@dataclass
class Runner:
    """Trains runs one after the other, each in its own process group, and leaves no process behind."""

    folder: Path  # of the comparison; receives the run folders and the log of each run
    runs: int  # total number of runs, for the progress
    started: int = 0

    def run(self, name: str, flags: Sequence[str], launcher: Sequence[str] = ()) -> Path:
        """Trains one run and returns its folder. Raises RunError with its last error line if it failed;
        KeyboardInterrupt and Stopped only after the run has ended."""
        self.started += 1
        log = self.folder / f"{name}.log"
        say(f"[{self.started}/{self.runs}] {name}: training, see {log}")
        where = ["--out", str(self.folder), "--name", name]
        with run_process.start(run_process.TRAIN, [*flags, *where], log, launcher=launcher) as child:
            child.wait()
        found = run_process.folders(self.folder, name)
        if child.returncode or not found:
            error = run_process.failure(log, child.returncode)
            say(f"{name}: {error}")
            raise RunError(error)
        return found[0]

    def train(self, planned: Planned) -> Variant:
        """Trains a variant; a run that failed or cannot be read is left out."""
        config = planned.run
        line = command("train", *planned.flags_of(planned.seeds[0]))
        variant = Variant(
            planned.name, config.placement.strategy_name, config.placement.world_size, config.placement.accumulate, line
        )
        for seed in planned.seeds:
            try:
                run = load(self.run(planned.run_name(seed), planned.flags_of(seed), planned.launcher))
                if planned.launcher and run.metrics["world_size"] != variant.world_size:
                    raise UsageError(f"--launcher started {run.metrics['world_size']} ranks, not {variant.world_size}")
                variant.runs.append(run)
            except (RunError, UsageError) as error:
                variant.judge("not trained", str(error))
        return variant


def plan(
    strategies: Sequence[str],
    devices: Sequence[str],
    accumulate: Sequence[str],
    seeds: int,
    rest: Sequence[str],
    launcher: Sequence[str] = (),
) -> list[Planned]:
    """Returns the variants to train. The reference is first: baseline, or without it the first value of each axis.

    Strategies, devices (a number of ranks, or NODESxRANKS) and accumulate are the axes; an empty one has train's
    default. `rest` are flags of train for all variants; `launcher` starts the ranks of all variants, or if some are
    on several nodes, of those. Raises UsageError if a variant cannot run here, or there is nothing to compare.
    """
    given = {flag.split("=")[0].removeprefix("--") for flag in rest}
    if "strategy" in given:
        raise UsageError("--strategy is for a single run: name the strategies to compare with --strategies")
    if max(len(strategies), len(devices), len(accumulate)) < 2:
        raise UsageError("nothing to compare: give two or more --strategies, --devices or --accumulate, or --runs")
    # --tensor_parallel_size is for the strategies that have it, not for the reference.
    sizes = {name: STRATEGIES[name].size for name in strategies if name in STRATEGIES}
    ordered = sorted(strategies, key=lambda name: name != "baseline")
    planned: list[Planned] = []
    for strategy, ranks, parts in product(ordered or [""], devices or [""], accumulate or [""]):
        flags = [
            "--check_steps",
            str(CHECKED_STEPS),
            *rest,
            *(command_line.strategy_flags(strategy) if strategy else []),
        ]
        for size in {*sizes.values()} & given - {sizes.get(strategy)}:
            flags += [f"--{size}", "0"]
        nodes, _, each = ranks.rpartition("x")
        flags += ["--num_nodes", nodes] if nodes else []
        flags += ["--devices", each] if each else []
        flags += ["--accumulate", parts] if parts else []
        for file in (name for name in strategies if name.endswith(".json")):  # all variants train its recipe
            flags = [*ds_config.flags_of(ds_config.options_of(file)), *flags]
        run = _resolved(flags, launcher)
        planned.append(Planned(run, flags, range(run.recipe.seed, run.recipe.seed + seeds)))
        _resolved(planned[-1].flags_of(planned[-1].seeds[-1]), launcher)
    shapes = [
        (
            config.placement.strategy_name,
            config.placement.world_size,
            config.placement.num_nodes,
            config.placement.accumulate,
        )
        for config in (variant.run for variant in planned)
    ]
    several = any(nodes > 1 for _, _, nodes, _ in shapes)
    for variant, name in zip(planned, variant_names(shapes), strict=True):
        variant.name = name
        variant.launcher = launcher if variant.run.placement.num_nodes > 1 or not several else ()
    folders = [variant.run_name(variant.seeds[0]) for variant in planned]
    if len({*folders}) < len(folders):
        names = ", ".join(variant.name for variant in planned)
        raise UsageError(f"two variants would share a folder; give each value once and rename *.json files: {names}")
    return planned


def prepare(planned: Sequence[Planned]) -> None:
    """Checks the Trainer's options and the weights of each variant and prepares the images, before the first run."""
    from cifar_zero import data
    from cifar_zero.training import build, starting

    quieten()
    warn_of_few_cores(max(int(variant.run.placement.devices) if variant.run.on_cpu else 1 for variant in planned))
    for run in (variant.run for variant in planned):
        build.check_trainer_options(run)
        starting.pretrained_weights(run)
    data.prepare(planned[0].run.data)


def _resolved(flags: list[str], launcher: Sequence[str]) -> Run:
    config = command_line.parse(flags)
    if config.recipe.only_measures or config.output.plot_schedule or config.output.check_gradients:
        raise UsageError("leave out --bench_steps, --plot_schedule and --check_gradients: cifar-zero compare trains")
    if config.placement.strategy == AUTO:
        raise UsageError("--strategies auto cannot be compared: name the strategy that cifar-zero plan recommends")
    if config.output.resume:
        raise UsageError("cifar-zero compare trains from the start: leave out --resume")
    run = resolve(config)
    if run.placement.num_nodes > 1 and not launcher:
        raise UsageError("cifar-zero compare starts ranks on one node only: leave out --num_nodes, or add --launcher")
    return run
