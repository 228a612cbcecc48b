"""Plans the variants that `cifar-zero compare` trains, checks each before the first run starts, and trains them, each
run in a separate process. Importing this module does not import torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from cifar_zero.comparison.reading import load_run, variant_names
from cifar_zero.comparison.result import Variant
from cifar_zero.config import command_line, ds_config
from cifar_zero.config.run import Run
from cifar_zero.config.settings import FALLBACK_SUFFIX
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.core import exits
from cifar_zero.core.console import command, say
from cifar_zero.core.errors import FaultFound, RunError, UsageError
from cifar_zero.core.hardware import REPOSITORY
from cifar_zero.launch import local_launcher
from cifar_zero.training.resolve import resolve, warn_of_few_cores

CHECKED_STEPS = 20
"""Number of optimizer steps of each run that plain PyTorch computes again, unless --check_steps is given. All steps are
audited."""

TRAIN = ("cifar_zero", "train")  # the Python module that trains a run, and its first argument

SAVING_SECONDS = 45.0  # time for a run to end; the launcher gives the ranks 30 s to write a checkpoint


@dataclass
class Planned:
    """A variant that is to be trained."""

    run: Run
    flags: list[str]  # flags of train, without --out and --name. Only flags may allow code to run
    variant: Variant

    @property
    def run_name(self) -> str:
        """The name of the run and of its folder, without spaces and commas."""
        return self.variant.name.replace(", ", "-").replace(" ", "_")


def train_variants(planned: Sequence[Planned], folder: Path) -> list[Variant]:
    """Trains the variants one after the other, with `folder` as the directory for run folders, and returns them with
    their runs. A variant whose run failed or cannot be read has the outcome "not trained"."""
    for number, each in enumerate(planned, 1):
        name = each.run_name
        say(f"[{number}/{len(planned)}] {name}: training, see {folder / name}.log")
        try:
            each.variant.run = load_run(train_run(name, each.flags, folder))
        except (RunError, UsageError) as error:
            say(f"{name}: {error}")
            each.variant.outcome, each.variant.remark = "not trained", str(error)
    return [each.variant for each in planned]


def train_run(name: str, flags: Sequence[str], folder: Path) -> Path:
    """Trains one run in a separate process group, and returns its folder.

    If this process is interrupted, the run receives SIGINT, as from Ctrl-C. Its process group is killed if it has not
    ended SAVING_SECONDS later, or at once if the user presses Ctrl-C again. Raises RunError with the run's last error
    line if the run failed, but not if its step check has found a fault.

    Args:
        flags: Flags of train, without --out and --name.
        folder: Directory for the run folder and the log.
    """
    log = folder / f"{name}.log"
    more = ["--out", str(folder), "--name", name]
    if exits.wants_traceback():
        more.append("--debug")
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(REPOSITORY))))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop(exits.STARTED, None)
    with log.open("w") as output:
        run = subprocess.Popen(
            # With -P, modules in the user's directory cannot shadow other modules.
            [sys.executable, "-P", "-m", *TRAIN, *flags, *more],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(local_launcher.prepare, cores=()),  # so that Ctrl-C works in a background job too
        )
    try:
        run.wait()
    finally:
        _end(run)
    folders = [*(folder / name).glob("version_*"), *(folder / (name + FALLBACK_SUFFIX)).glob("version_*")]
    if run.returncode not in (0, FaultFound.exit_code) or not folders:
        raise RunError(_failure(log, run.returncode))
    return folders[0]


def _end(run: subprocess.Popen[bytes]) -> None:
    """Ends a run that still runs: sends SIGINT and waits up to SAVING_SECONDS. Then kills whatever is left of its
    process group, also if the run had already ended."""
    try:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGINT)  # like Ctrl-C: the ranks save a checkpoint, then all end
            with suppress(subprocess.TimeoutExpired):
                run.wait(SAVING_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def _failure(log: Path, code: int) -> str:
    """Returns why a run failed: the last line of its log that begins with `error:`, without this word, or else how the
    run ended and the last line of the log. With --debug, also prints the full log to standard error."""
    text = log.read_text(errors="replace")
    if exits.wants_traceback():
        sys.stderr.write(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    return ": ".join([local_launcher.how_ended(code), *lines[-1:]])


def plan_variants(
    strategies: Sequence[str], devices: Sequence[str], accumulate: Sequence[str], rest: Sequence[str]
) -> list[Planned]:
    """Returns a variant for each combination of `strategies`, `devices` and `accumulate`, of which an empty one stands
    for the default of train. The first variant is the reference; its strategy is baseline, if that is among
    `strategies`. Raises UsageError if a variant cannot run on this machine, if `rest` has an option that does not work
    with compare, or if there is nothing to compare.

    Args:
        strategies: Names of strategies, or DeepSpeed configurations. All variants train the recipe of a configuration.
        devices: Numbers of ranks.
        accumulate: Numbers of micro-batches per step.
        rest: Flags of train for all variants.
    """
    if any(word.split("=")[0] == "--strategy" for word in rest):
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
        flags = [*common]
        if strategy:
            flags += command_line.strategy_flags(strategy)
        if ranks:
            flags += ["--devices", ranks]
        if parts:
            flags += ["--accumulate", parts]
        planned.append(Planned(_resolved(flags), flags, Variant("", command("train", *flags))))
    places = [each.run.placement for each in planned]
    names = variant_names([(each.strategy_name, each.world_size, each.num_nodes, each.accumulate) for each in places])
    for each, name in zip(planned, names, strict=True):
        each.variant.name = name
    if len({each.run_name for each in planned}) < len(planned):
        listed = ", ".join(names)
        raise UsageError(f"two variants would share a folder; give each value once and rename *.json files: {listed}")
    return planned


def prepare(planned: Sequence[Planned]) -> None:
    """Prepares the images, and checks the Trainer options and pretrained weights of each variant. Warns if there are
    fewer CPU cores than ranks. Call it before the first run."""
    from cifar_zero import data
    from cifar_zero.training import build, starting

    runs = [each.run for each in planned]
    warn_of_few_cores(max(int(run.placement.devices) if run.on_cpu else 1 for run in runs))
    for run in runs:
        build.check_trainer_options(run)
        starting.pretrained_weights(run)
    data.prepare(runs[0].data)


def _resolved(flags: list[str]) -> Run:
    config = command_line.parse(flags)
    if config.recipe.only_measures:
        raise UsageError("cifar-zero compare trains: leave out --bench_steps")
    if config.placement.strategy == AUTO:
        raise UsageError("--strategies auto cannot be compared: name the strategy that cifar-zero plan recommends")
    if config.output.resume:
        raise UsageError("cifar-zero compare trains from the start: leave out --resume")
    if config.placement.num_nodes > 1:
        raise UsageError(
            "cifar-zero compare starts ranks on one node only: leave out --num_nodes, or train the runs with their "
            "launcher and compare them with --runs"
        )
    return resolve(config)
