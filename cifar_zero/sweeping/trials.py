"""The search space of a sweep, its study in SQLite, and its trials: each is one run, a setting and a seed."""

import re
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, Trial, TrialState

from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.reports.summary import REPOSITORY
from cifar_zero.sweeping import runs
from cifar_zero.training import run_process

Space = dict[str, BaseDistribution]  # the distribution of each option; listed values stay text, as on the command line

SEED = "seed"  # the option that is no part of a setting: each setting is trained with each seed

ENQUEUED = "fixed_params"  # where Optuna keeps the options of a trial that was enqueued, not sampled

NUMBER = r"([-+]?[\d.]+(?:[eE][-+]?\d+)?)"
RANGE = re.compile(rf"{NUMBER}\.\.{NUMBER}(?::(\S+))?")  # LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP


def parse(definitions: list[str]) -> Space:
    """Returns the space of --search NAME=VALUES ...; raises UsageError if one cannot be read."""
    space: Space = {}
    for definition in definitions:
        name, _, text = definition.partition("=")
        try:
            space[name] = _distribution(text)
        except ValueError as error:
            why = str(error).rstrip(".")
            raise UsageError(f"--search {definition}: {why}; write NAME=A,B or NAME=LOW..HIGH") from error
    if SEED in space and not isinstance(space[SEED], CategoricalDistribution):
        raise UsageError("--search seed takes no range: list the seeds, seed=0,1,2")
    return space


def is_grid(space: Space) -> bool:
    """Whether all combinations can be listed: no option has a range."""
    return all(isinstance(distribution, CategoricalDistribution) for distribution in space.values())


def combinations(space: Space) -> list[dict[str, Any]]:
    return [dict(zip(space, row, strict=True)) for row in product(*lists(space).values())]


def samples(space: Space) -> list[dict[str, Any]]:
    """Returns combinations in which each value, and each end of a range, occurs."""
    longest = max(map(len, lists(space).values()))
    return [{name: each[place % len(each)] for name, each in lists(space).items()} for place in range(longest)]


def lists(space: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns the listed values of each option, or the lowest and the highest of its range."""
    return {name: [*getattr(each, "choices", ())] or [each.low, each.high] for name, each in space.items()}


def _distribution(text: str) -> BaseDistribution:
    found = RANGE.fullmatch(text)
    if found is None:
        listed = re.split(r",(?![^\[]*\])", text)  # not at the commas within [64,64]
        if "" in listed:
            raise ValueError("a value is missing")
        return CategoricalDistribution(listed)
    low, high, suffix = found.groups()
    log, step = suffix == "log", None if suffix == "log" else suffix
    if all(number.isdecimal() for number in (low, high, step or "1")):
        return IntDistribution(int(low), int(high), log, int(step or 1))
    return FloatDistribution(float(low), float(high), log, float(step) if step else None)


def open_study(folder: Path, record: str, metric: str) -> optuna.Study:
    """Opens or creates the study in a folder; raises UsageError if it has another record of what must not change."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage, direction = f"sqlite:///{folder / 'sweep.db'}", runs.METRICS[metric]
    study = optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)
    if study.user_attrs.get("record", record) != record:
        raise UsageError(f"{folder} holds a sweep with another --search, --metric or recipe: choose another --name")
    study.set_user_attr("record", record)
    return study


def enqueue(study: optuna.Study, space: Space, sampler: str, settings: int, seed: int) -> int:
    """Enqueues what was interrupted or failed, and all of a grid; returns how many other settings are to be sampled.
    Optuna's GridSampler may try a setting twice when trials run at the same time, and fails if an enqueued trial comes
    last (Optuna 5.0, samplers/_grid.py)."""
    for trial in latest(study):
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
        if trial.state in (TrialState.RUNNING, TrialState.FAIL):
            study.enqueue_trial(options(trial))
    for combination in combinations(space) if sampler == "grid" else ():
        study.enqueue_trial(combination, skip_if_exists=True)
    make = optuna.samplers.TPESampler if sampler == "tpe" else optuna.samplers.RandomSampler
    study.sampler = make(seed=seed + len(study.trials))  # with the same seed it would repeat its first settings
    known, count = set[str](), 0
    for trial in study.trials:  # a setting counts again if it was sampled again
        setting = str({**options(trial), SEED: None})
        count += setting not in known or ENQUEUED not in trial.system_attrs
        known.add(setting)
    return 0 if sampler == "grid" else max(0, settings - count)


def latest(study: optuna.Study) -> list[FrozenTrial]:
    return [*{str(options(trial)): trial for trial in study.trials}.values()]


def options(trial: FrozenTrial) -> dict[str, Any]:
    """Returns the options of a trial; one that is enqueued has them before it starts."""
    return trial.system_attrs.get(ENQUEUED, trial.params)


@dataclass
class Trials:
    """Asks the study for trials and trains them, in a thread for each slot."""

    folder: Path
    study: optuna.Study
    space: Space
    metric: str
    flags: list[str]  # train.py's flags that all runs share
    prune: bool  # whether a run ends when its validations are behind the median (Optuna's default pruner)
    to_sample: int  # settings that the sampler chooses, when nothing is enqueued
    program: str = str(REPOSITORY / "train.py")
    stopped: bool = False
    asking: threading.Lock = field(default_factory=threading.Lock)
    training: defaultdict[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))
    """By run: a sampler may draw a setting again before its run has ended, which then waits for the result."""

    @property
    def waiting(self) -> int:
        seeds = len(lists(self.space).get(SEED, [None]))
        return len(self.study.get_trials(states=(TrialState.WAITING,))) + self.to_sample * seeds

    def train(self, slots: list[runs.Slot]) -> None:
        """Returns when all runs have ended; whatever ends it before, the runs save and no process is left."""
        with ThreadPoolExecutor(len(slots)) as pool:
            try:
                for _ in pool.map(self._work, slots):
                    pass
            finally:
                self.stopped = True

    def _work(self, slot: runs.Slot) -> None:
        while (trial := self._ask()) is not None:
            name = runs.name_of(trial.params)
            try:
                with self.training[name]:
                    result = runs.result(self.folder, name, self.metric) or self._run(trial, name, slot)
                trial.set_user_attr("run", {SEED: trial.params.get(SEED), **result})
                self.study.tell(trial, result["value"])
                outcome = f"{self.metric} {runs.shown(result['value'])}"
            except optuna.TrialPruned:
                self.study.tell(trial, state=TrialState.PRUNED)
                outcome = "pruned"
            except (RunError, OSError) as error:
                trial.set_user_attr("error", f"{name}: {error}")
                self.study.tell(trial, state=TrialState.FAIL)
                outcome = str(error)
            print(f"{name}: {outcome} ({self.waiting} to start)", file=sys.stderr, flush=True)

    def _ask(self) -> Trial | None:
        with self.asking:
            if self.stopped or not self.waiting:
                return None
            self.to_sample -= not self.study.get_trials(states=(TrialState.WAITING,))
            trial = self.study.ask(self.space)
            for seed in lists(self.space).get(SEED, ()):
                self.study.enqueue_trial({**trial.params, SEED: seed}, skip_if_exists=True)
            return trial

    def _run(self, trial: Trial, name: str, slot: runs.Slot) -> dict[str, Any]:
        log, epochs = self.folder / f"{name}.log", 0
        flags = [*self.flags, *runs.flags_of(trial.params), "--name", name]
        with run_process.start([self.program], flags, log, *slot) as process:
            while process.poll() is None and not self.stopped:
                time.sleep(run_process.POLL_SECONDS)
                for value in runs.validations(self.folder, name)[epochs:] if self.prune else ():
                    trial.report(value, epochs := epochs + 1)
                if self.prune and trial.should_prune():
                    raise optuna.TrialPruned
        result = runs.result(self.folder, name, self.metric) if process.returncode == 0 else None
        if result is None:
            raise RunError(run_process.failure(log, process.returncode))
        return result
