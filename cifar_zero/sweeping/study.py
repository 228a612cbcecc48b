"""Runs a sweep over settings. A setting is a combination of values for the options of --search. Optuna chooses and
records settings, and cifar-zero train trains a run for each setting and seed."""

import json
import re
import shlex
import statistics
import sys
from argparse import Namespace
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from cifar_zero.checkpoints import run_folder
from cifar_zero.config import command_line
from cifar_zero.config.ds_config import flags_of
from cifar_zero.config.rules import check_plain_name
from cifar_zero.config.run import Run
from cifar_zero.config.settings import flat
from cifar_zero.config.strategy_rules import why_not_resumed
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.core.console import command
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.training import run_process
from cifar_zero.training.resolve import resolve

# The accuracy of a run's last validation. If the test set chose the settings, its accuracy would be too optimistic.
METRIC = "val/acc"
NUMBER = r"([-+]?[\d.]+(?:[eE][-+]?\d+)?)"
RANGE = re.compile(rf"{NUMBER}\.\.{NUMBER}(?::(\S+))?")  # LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP
TRIALS = 20  # number of settings that Optuna chooses without --trials

SET_BY_SWEEP = ("name", "out")  # options of train that a sweep sets itself

Space = dict[str, BaseDistribution]  # possible values of each option; listed values stay text, as on the command line


def run(arguments: Namespace, rest: list[str]) -> int:
    """Runs a sweep: trains a run for each setting of --search and each seed, and prints the results. Returns the exit
    code, which is 1 if a setting failed.

    Args:
        arguments: The options of sweep.
        rest: Flags of train, which are passed on to every run.
    """
    check_plain_name(arguments.name)
    if arguments.trials is not None and arguments.trials < 1:
        raise UsageError(f"--trials must be at least 1, not {arguments.trials}")
    space, seeds = parse(arguments.search)
    settings = combinations(space)
    runs = [resolved([*rest, *flags_of(setting | seed)]) for setting in settings for seed in seeds]
    flags = rest if any(map(why_not_resumed, runs)) else [*rest, "--resume", "auto"]
    folder = Path(arguments.out) / (arguments.name or runs[0].recipe.model_name)
    folder.mkdir(parents=True, exist_ok=True)
    study = open_study(folder, shlex.join([*arguments.search, *rest]))
    trials = arguments.trials or TRIALS
    if not arguments.trials and all(isinstance(values, CategoricalDistribution) for values in space.values()):
        trials = 0  # a grid, whose settings are enqueued
    lock = FileLock(folder / "sweep.lock")
    try:
        with suppress(Timeout):  # another sweep has enqueued the settings, and this process helps it
            lock.acquire(timeout=0)
            for setting, trial in latest(study):
                if trial.state in (TrialState.RUNNING, TrialState.FAIL):  # RUNNING: it was interrupted
                    study.enqueue_trial(setting)
            for setting in [] if trials else settings:
                study.enqueue_trial(setting, skip_if_exists=True)
        search(study, space, seeds, trials, folder, flags)
    finally:  # also after Ctrl-C
        lock.release()
        code = report(study, [*space], rest)
    return code


def parse(definitions: list[str]) -> tuple[Space, list[dict[str, Any]]]:
    """Parses --search NAME=VALUES ... Returns the search space, and a list with one dict {"seed": SEED} for each seed.
    Without seeds, the list has a single empty dict. Raises UsageError if values cannot be parsed, or if seeds are given
    as a range."""
    space: Space = {}
    for definition in definitions:
        name, _, text = definition.partition("=")
        if name in SET_BY_SWEEP:
            raise UsageError(f"--search {definition}: the sweep sets --{name} of each run: leave it out")
        try:
            space[name] = _distribution(text)
        except ValueError as error:
            why = str(error).rstrip(".")
            raise UsageError(f"--search {definition}: {why}; write NAME=A,B or NAME=LOW..HIGH") from error
    if "seed" not in space:
        return space, [{}]
    seeds = space.pop("seed")
    if not isinstance(seeds, CategoricalDistribution):
        raise UsageError("--search seed takes no range: list the seeds, seed=0,1,2")
    return space, [{"seed": seed} for seed in seeds.choices]


def _distribution(text: str) -> BaseDistribution:
    found = RANGE.fullmatch(text)
    if not found:
        listed = re.split(r",(?![^\[]*\])", text)  # does not split at commas in brackets, as in [64,64]
        if "" in listed:
            raise ValueError("a value is missing")
        return CategoricalDistribution(listed)
    low, high, step = found.groups()
    log = step == "log"
    if log:
        step = None
    if all(number.isdecimal() for number in (low, high, step or "1")):
        return IntDistribution(int(low), int(high), log, int(step or 1))
    return FloatDistribution(float(low), float(high), log, float(step) if step else None)


def combinations(space: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns all combinations of the options' values in a search space. The values of a range are its two ends."""
    values: Any = [getattr(each, "choices", None) or (each.low, each.high) for each in space.values()]
    return [dict(zip(space, row, strict=True)) for row in product(*values)]


def resolved(flags: list[str]) -> Run:
    """Returns the resolved run for flags of train. Raises UsageError if the run cannot be trained, or if an option
    cannot be used in a sweep."""
    config = command_line.parse(flags)
    for name in ("bench_steps", "plot_schedule", "check_gradients", "resume"):
        if flat(config)[name]:
            raise UsageError(f"--{name} cannot be used in a sweep: leave it out")
    if config.placement.strategy == AUTO or config.placement.num_nodes > 1:
        raise UsageError(
            "cifar-zero sweep takes neither --strategy auto nor --num_nodes: name a strategy for this machine"
        )
    if not config.data.val_fraction:
        raise UsageError("a sweep ranks settings by val/acc: add --data.val_fraction 0.1")
    return resolve(config)


def open_study(folder: Path, record: str) -> optuna.Study:
    """Opens or creates the Optuna study in a folder. `record` is the text of the sweep's --search and flags. Raises
    UsageError if the study was created with another record."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    where = f"sqlite:///{folder / 'sweep.db'}"
    study = optuna.create_study(storage=where, study_name="sweep", direction="maximize", load_if_exists=True)
    if study.user_attrs.get("record", record) != record:
        raise UsageError(f"{folder} contains a sweep with another --search or recipe: choose another --name")
    study.set_user_attr("record", record)
    return study


def latest(study: optuna.Study) -> list[tuple[dict[str, Any], FrozenTrial]]:
    """Returns each setting of a study with its last trial. Optuna keeps the options of an enqueued trial in
    `fixed_params`."""
    found: dict[str, tuple[dict[str, Any], FrozenTrial]] = {}
    for trial in study.trials:
        setting = trial.system_attrs.get("fixed_params", trial.params)
        found[str(setting)] = setting, trial
    return [*found.values()]


def search(
    study: optuna.Study, space: Space, seeds: list[dict[str, Any]], trials: int, folder: Path, flags: list[str]
) -> None:
    """Trains all enqueued settings with each seed, and then settings that Optuna chooses. Returns when Optuna has
    chosen `trials` settings, and no enqueued setting is left. Failed trials count too.

    Args:
        study: The study that records the trials.
        space: The search space from which Optuna chooses.
        seeds: A dict {"seed": SEED} for each seed, or a single empty dict.
        trials: Number of settings that Optuna chooses.
        folder: Directory for the run folders and logs.
        flags: Flags of train for every run.
    """
    while True:
        chosen = sum("fixed_params" not in trial.system_attrs for trial in study.trials)
        if chosen >= trials and not study.get_trials(states=(TrialState.WAITING,)):
            return
        trial = study.ask(space)
        try:
            values = [train(folder, flags, trial.params | seed) for seed in seeds]
        except (RunError, OSError) as error:
            print(f"failed: {error}", file=sys.stderr)
            study.tell(trial, state=TrialState.FAIL)
        else:
            trial.set_user_attr("values", values)
            study.tell(trial, statistics.fmean(values))


def train(folder: Path, flags: list[str], options: dict[str, Any]) -> float:
    """Trains the run of a setting and a seed if it is not trained already, and returns its last val/acc. Raises
    RunError if the run failed, or ended before its first validation.

    Args:
        folder: Directory for the run folder and the log.
        flags: Flags of train for every run of the sweep.
        options: The options of the setting, and the seed.
    """
    name = re.sub(r"[^\w.+-]+", "_", "-".join(f"{key}_{shown(value)}" for key, value in options.items()))
    log = folder / f"{name}.log"
    with FileLock(folder / f"{name}.lock"):  # another sweep may train the same setting
        if not _metrics(folder, name):
            where = ["--out", str(folder), "--name", name]
            with run_process.start(run_process.TRAIN, [*flags, *flags_of(options), *where], log) as run:
                code = run.wait()
            if code:
                raise RunError(f"{name}: {run_process.failure(log, code)}")
    value = json.loads(_metrics(folder, name)[-1].read_text()).get(METRIC)
    if value is None:
        fix = "an epoch must end before --max_steps; delete the folder to train it again"
        raise RunError(f"{folder / name} ended without {METRIC}: {fix}")
    print(f"{name}: {METRIC} {shown(value)}", file=sys.stderr, flush=True)
    return value


def _metrics(folder: Path, name: str) -> list[Path]:
    files = [run / run_folder.METRICS for run in run_process.folders(folder, name)]
    return [file for file in files if file.is_file()]


def report(study: optuna.Study, names: list[str], rest: list[str]) -> int:
    """Prints the result of each setting, the best first, and the command that trains the best setting. Returns the exit
    code, which is 1 if a setting failed.

    Args:
        study: The study of the sweep.
        names: Names of the options of --search.
        rest: Flags of train for every run.
    """
    found = sorted(latest(study), key=lambda each: each[1].value or -1.0, reverse=True)
    table = Table(*names, f"mean {METRIC}", "of each seed", "state")
    for setting, trial in found:
        options, each = [setting.get(name, "") for name in names], trial.user_attrs.get("values", [])
        mean = "" if trial.value is None else trial.value
        table.add_row(*map(shown, [*options, mean, ", ".join(map(shown, each)), trial.state.name.lower()]))
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160).print(table)
    if found and found[0][1].value is not None:
        print(f"best    {command('train', *rest, *flags_of(found[0][0]))}")
    return int(any(trial.state == TrialState.FAIL for _, trial in found))


def shown(value: object) -> str:
    """Returns a value as text, with six digits if it is a float."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
