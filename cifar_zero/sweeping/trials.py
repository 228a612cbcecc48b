"""The trials of a sweep: Optuna's study in SQLite, and its runs. Each trial is one run: a setting and a seed."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.sweeping import runs
from cifar_zero.sweeping.space import SEED, Space, combinations, lists
from cifar_zero.training import run_process


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
    last (Optuna 5.0, samplers/_grid.py).
    """
    for trial in latest(study):
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
        if trial.state in (TrialState.RUNNING, TrialState.FAIL):
            study.enqueue_trial(options(trial))
    for combination in combinations(space) if sampler == "grid" else ():
        study.enqueue_trial(combination, skip_if_exists=True)
    make = optuna.samplers.TPESampler if sampler == "tpe" else optuna.samplers.RandomSampler
    study.sampler = make(seed=seed + len(study.trials))  # with the same seed it would repeat its first settings
    known = {str({**options(trial), SEED: None}) for trial in study.trials}
    return 0 if sampler == "grid" else max(0, settings - len(known))


def latest(study: optuna.Study) -> list[FrozenTrial]:
    """Returns the latest trial of each setting and seed."""
    return [*{str(options(trial)): trial for trial in study.trials}.values()]


def options(trial: FrozenTrial) -> dict[str, Any]:
    """Returns the options of a trial; one that is enqueued has them before it starts."""
    return trial.system_attrs.get("fixed_params", trial.params)


@dataclass
class Trials:
    """Asks the study for trials and trains them, in a thread for each slot."""

    folder: Path
    study: optuna.Study
    space: Space
    metric: str
    flags: list[str]
    """train.py's flags that all runs share."""
    prune: bool
    """Whether a run is ended when its validations are behind the median of the others (Optuna's default pruner)."""
    to_sample: int
    """Settings that the sampler chooses, when nothing is enqueued."""
    program: str
    """train.py."""
    stopped: bool = False
    asking: threading.Lock = field(default_factory=threading.Lock)

    @property
    def waiting(self) -> int:
        """Runs that have not started."""
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
        """Trains, and returns the result."""
        log, epochs = self.folder / f"{name}.log", 0
        flags = [*self.flags, *runs.flags_of(trial.params), "--name", name]
        process = run_process.start([self.program], flags, log, *slot)
        try:
            while process.poll() is None and not self.stopped:
                time.sleep(run_process.POLL_SECONDS)
                for value in runs.validations(self.folder, name)[epochs:] if self.prune else ():
                    trial.report(value, epochs := epochs + 1)
                if self.prune and trial.should_prune():
                    raise optuna.TrialPruned
        finally:
            run_process.end([process])
        result = runs.result(self.folder, name, self.metric) if process.returncode == 0 else None
        if result is None:
            raise RunError(run_process.failure(log, process.returncode))
        return result
