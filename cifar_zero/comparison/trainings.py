"""Plans the variants that `cifar-zero compare` trains, checks each before the first run starts, and trains them.
Importing this module does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from cifar_zero.comparison.reading import load_run, variant_names
from cifar_zero.comparison.result import Variant
from cifar_zero.config import command_line, ds_config
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import AUTO, STRATEGIES
from cifar_zero.core.console import command, quieten, say
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.training import run_process
from cifar_zero.training.resolve import resolve, warn_of_few_cores

CHECKED_STEPS = 20
"""Number of optimizer steps of each run that are computed again by plain PyTorch. All steps are audited. --check_steps
overrides it."""


@dataclass
class Planned:
    """A variant that is to be trained, with a run for each seed."""

    run: Run  # the run of its first seed
    flags: list[str]  # flags of train, without --seed, --out and --name. Only flags may allow code to run
    variant: Variant
    seeds: range
    launcher: Sequence[str] = ()  # see `run_process.start`

    def flags_of(self, seed: int) -> list[str]:
        """Returns the `cifar-zero train` flags for the run with this seed, without --out and --name."""
        return [*self.flags, "--seed", str(seed)]

    def run_name(self, seed: int) -> str:
        """Returns the name of the run with this seed, which is also the name of its folder and of its curves."""
        name = self.variant.name.replace(", ", "-").replace(" ", "_")
        return name if len(self.seeds) == 1 else f"{name}-seed_{seed}"


def train_variants(planned: Sequence[Planned], folder: Path) -> list[Variant]:
    """Trains a run of each variant for each of its seeds, with `folder` as the directory for run folders. Returns the
    variants. A run that failed or cannot be read is left out, and its variant gets the verdict "not trained"."""
    trainings = [(each, seed) for each in planned for seed in each.seeds]
    for number, (each, seed) in enumerate(trainings, 1):
        name = each.run_name(seed)
        say(f"[{number}/{len(trainings)}] {name}: training, see {folder / name}.log")
        try:
            run = load_run(train_run(name, each.flags_of(seed), folder, each.launcher))
            ranks = run.metrics["world_size"]
            if ranks != each.variant.world_size:
                raise UsageError(f"--launcher started {ranks} ranks, not {each.variant.world_size}")
            each.variant.runs.append(run)
        except (RunError, UsageError) as error:
            say(f"{name}: {error}")
            each.variant.outcome, each.variant.remark = "not trained", str(error)
    return [each.variant for each in planned]


def train_run(name: str, flags: Sequence[str], folder: Path, launcher: Sequence[str] = ()) -> Path:
    """Trains one run and returns its folder. No process of the run is left afterwards, also if this process is
    interrupted. Raises RunError with the run's last error line if the run failed.

    Args:
        flags: Flags of train, without --out and --name.
        folder: Directory for the run folder and the log.
        launcher: See `run_process.start`.
    """
    log = folder / f"{name}.log"
    where = ["--out", str(folder), "--name", name]
    with run_process.start([*flags, *where], log, launcher) as child:
        child.wait()
    run_folders = run_process.folders(folder, name)
    if child.returncode or not run_folders:
        raise RunError(run_process.failure(log, child.returncode))
    return run_folders[0]


def plan_variants(
    strategies: Sequence[str],
    devices: Sequence[str],
    accumulate: Sequence[str],
    seeds: int,
    rest: Sequence[str],
    launcher: Sequence[str] = (),
) -> list[Planned]:
    """Returns the variants to train, one for each combination of `strategies`, `devices` and `accumulate`. An empty
    argument stands for the default of train. The first variant is the reference. Its strategy is baseline, if that is
    among `strategies`. Raises UsageError if a variant cannot run on this machine, or there is nothing to compare.

    Args:
        strategies: Names of strategies, or DeepSpeed configurations.
        devices: Numbers of ranks, or NODESxRANKS.
        accumulate: Numbers of micro-batches per step.
        seeds: Number of runs of each variant.
        rest: Flags of train for all variants.
        launcher: Command that starts the ranks. If some variants are on several nodes, it starts only their ranks.
    """
    common_flags = {flag.split("=")[0].removeprefix("--") for flag in rest}
    if "strategy" in common_flags:
        raise UsageError("--strategy does not work with cifar-zero compare: give --strategies")
    if max(len(strategies), len(devices), len(accumulate)) < 2:
        raise UsageError("nothing to compare: give two or more --strategies, --devices or --accumulate, or --runs")
    common = ["--check_steps", str(CHECKED_STEPS), *rest]
    for file in strategies:  # all variants train the recipe of a DeepSpeed configuration
        if file.endswith(".json"):
            common = [*ds_config.flags_of(ds_config.options_of(file)), *common]
    ordered = sorted(strategies, key=lambda name: name != "baseline")
    planned = []
    for strategy, ranks, parts in product(ordered or [""], devices or [""], accumulate or [""]):
        flags = [*common, *_sizes(strategy, strategies, common_flags)]
        if strategy:
            flags += command_line.strategy_flags(strategy)
        if ranks:
            nodes, _, per_node = ranks.rpartition("x")
            flags += ["--devices", per_node, *(["--num_nodes", nodes] if nodes else [])]
        if parts:
            flags += ["--accumulate", parts]
        run = _resolved(flags, launcher)
        variant = Variant("", run.placement.strategy_name, run.placement.world_size)
        first = run.recipe.seed
        planned.append(Planned(run, flags, variant, range(first, first + seeds)))
        variant.command = command("train", *planned[-1].flags_of(first))
    places = [each.run.placement for each in planned]
    names = variant_names([(each.strategy_name, each.world_size, each.num_nodes, each.accumulate) for each in places])
    several_nodes = any(place.num_nodes > 1 for place in places)
    for each, name in zip(planned, names, strict=True):
        each.variant.name = name
        if each.run.placement.num_nodes > 1 or not several_nodes:
            each.launcher = launcher
    if len({each.run_name(each.seeds[0]) for each in planned}) < len(planned):
        listed = ", ".join(names)
        raise UsageError(f"two variants would share a folder; give each value once and rename *.json files: {listed}")
    return planned


def _sizes(strategy: str, strategies: Sequence[str], common_flags: set[str]) -> list[str]:
    """Returns flags that set the size options of the other `strategies` to 0 for `strategy`. A size option, such as
    --tensor_parallel_size, belongs to one strategy, but `common_flags` are given for all variants."""
    sizes = {STRATEGIES[name].size for name in strategies if name in STRATEGIES}
    own = STRATEGIES[strategy].size if strategy in STRATEGIES else None
    flags = []
    for size in sizes & common_flags:
        if size != own:
            flags += [f"--{size}", "0"]
    return flags


def prepare(planned: Sequence[Planned]) -> None:
    """Checks the Trainer options and the pretrained weights of each variant, and prepares the images. Call it before
    the first run."""
    from cifar_zero import data
    from cifar_zero.training import build, starting

    quieten()
    runs = [each.run for each in planned]
    warn_of_few_cores(max(int(run.placement.devices) if run.on_cpu else 1 for run in runs))
    for run in runs:
        build.check_trainer_options(run)
        starting.pretrained_weights(run)
    data.prepare(runs[0].data)


def _resolved(flags: list[str], launcher: Sequence[str]) -> Run:
    config = command_line.parse(flags)
    if config.recipe.only_measures:
        raise UsageError("cifar-zero compare trains: leave out --bench_steps")
    if config.placement.strategy == AUTO:
        raise UsageError("--strategies auto cannot be compared: name the strategy that cifar-zero plan recommends")
    if config.output.resume:
        raise UsageError("cifar-zero compare trains from the start: leave out --resume")
    run = resolve(config)
    if run.placement.num_nodes > 1 and not launcher:
        raise UsageError("cifar-zero compare starts ranks on one node only: leave out --num_nodes, or add --launcher")
    return run
