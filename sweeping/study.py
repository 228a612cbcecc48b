"""Optuna's study: which setting comes next, and what became of each, in a file that outlives this process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, Trial, TrialState

from errors import UsageError
from sweeping.metric import METRICS
from sweeping.result import Result, Run, State
from sweeping.space import Range, Setting, Space, Values

DATABASE = "sweep.db"
NAME = "sweep"
"""Of the only study in it."""

STATES: dict[TrialState, State] = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "cut off",
}

RECORD, RUNS, ERROR = "record", "runs", "error"
"""Attributes of the study and of its trials."""


PROPOSALS = 50
"""How often tpe is asked for a setting of values that has not been tried."""

LISTED = 10**5
"""Most settings of values that are laid out to be shuffled."""


class Study:
    """The trials of a sweep, each a setting, in SQLite: a kill or a full disk leaves its last transaction whole.

    Args:
        folder: of the sweep.
        record: what makes it this sweep and no other: a string for each thing that must be the same to go on.
        space: what is searched.
        whole: names of the parameters that are whole numbers.
        metric: that settings are chosen by.
        sampler: grid, random or tpe.
        trials: settings in all; of values at most as many as there are, and a grid has its own number.
        seed: of the sampler.

    Raises:
        UsageError: the study in this folder is of another sweep.
    """

    def __init__(
        self,
        folder: Path,
        record: dict[str, str],
        space: Space,
        whole: set[str],
        metric: str,
        sampler: str,
        trials: int,
        seed: int,
    ):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(
            storage=f"sqlite:///{folder / DATABASE}",
            study_name=NAME,
            direction=METRICS[metric],
            # The median stopping rule (Golovin et al. 2017, Google Vizier), with Optuna's defaults.
            pruner=optuna.pruners.MedianPruner(),
            load_if_exists=True,
        )
        _check_same(self._study, record, folder)
        known = self._study.trials
        # A sampler that begins anew with its seed would draw what it has drawn before.
        drawn = seed + len(known)
        self._study.sampler = (
            optuna.samplers.TPESampler(seed=drawn) if sampler == "tpe" else optuna.samplers.RandomSampler(seed=drawn)
        )
        self._distributions = {each.name: _distribution(each, each.name in whole) for each in space.parameters}
        self._cut_off = [trial for trial in known if trial.state == TrialState.RUNNING]
        kept = [_setting(trial.params) for trial in known if trial.state != TrialState.FAIL]
        failed = [_setting(trial.params) for trial in known if trial.state == TrialState.FAIL]
        self._grid: list[Setting] = []
        """To be tried next, in this order."""
        self._shuffled: Iterator[Setting] | None = None
        """Of values alone: those that have not been tried, from which random and tpe choose."""
        self._left = max(0, trials - len(kept))
        if sampler == "grid":
            self._grid = [setting for setting in space.combinations() if setting not in kept]
            self._left = len(self._grid)
        elif space.is_grid:
            self._left = min(self._left, space.size - len({_key(setting) for setting in kept}))
            again = {_key(setting): setting for setting in failed if setting not in kept}
            self._grid = [*again.values()][: self._left]
            self._tried = {_key(setting) for setting in kept + failed}
            self._shuffled = _shuffled(space, drawn)
            self._by_tpe = sampler == "tpe"

    @property
    def left(self) -> int:
        """Settings that will be asked for."""
        return len(self._cut_off) + self._left

    def ask(self) -> tuple[int, Setting] | None:
        """The number and the setting of the next trial: those that were cut off first; None where there are no more."""
        if self._cut_off:
            trial = self._cut_off.pop(0)
            return trial.number, _setting(trial.params)
        if not self._left:
            return None
        self._left -= 1
        if not self._grid and self._shuffled is None:
            asked = self._study.ask(self._distributions)
            return asked.number, _setting(asked.params)
        setting = self._grid.pop(0) if self._grid else self._untried()
        made = optuna.create_trial(state=TrialState.RUNNING, params=dict(setting), distributions=self._distributions)
        self._study.add_trial(made)
        return self._study.trials[-1].number, setting

    def prunes(self, number: int, values: list[float]) -> bool:
        """Whether a trial whose first seed has these validations so far is behind the others."""
        trial, told = self._trial(number), self._study.trials[number].intermediate_values
        for epoch in range(len(told), len(values)):
            trial.report(values[epoch], epoch)
        return trial.should_prune()

    def finish(self, number: int, runs: list[Run]) -> None:
        """A trial whose runs have all finished; its value is their mean."""
        self._trial(number).set_user_attr(RUNS, [asdict(run) for run in runs])
        self._study.tell(number, sum(run.value for run in runs) / len(runs))

    def prune(self, number: int) -> None:
        """A trial that was ended because it was behind."""
        self._study.tell(number, state=TrialState.PRUNED)

    def fail(self, number: int, error: str) -> None:
        """A trial of which a run failed; started again the sweep tries the setting again."""
        self._trial(number).set_user_attr(ERROR, error)
        self._study.tell(number, state=TrialState.FAIL)

    def results(self) -> list[Result]:
        """What became of each setting so far; of one that was tried again what it came to then."""
        found: dict[tuple[tuple[str, str], ...], Result] = {}
        for trial in self._study.trials:
            setting = _setting(trial.params)
            runs = [Run(**run) for run in trial.user_attrs.get(RUNS, [])]
            found[*setting.items(),] = Result(
                trial.number, setting, STATES[trial.state], runs, trial.user_attrs.get(ERROR, "")
            )
        return list(found.values())

    def _untried(self) -> Setting:
        """A setting of values that no trial has: two of them would share a folder, and say nothing new.

        Optuna's samplers draw from all of them. tpe is asked in a copy of the study, whose trials leave no trace; where
        it names nothing new any more the setting is a random one.
        """
        assert self._shuffled is not None
        untried = (setting for setting in self._shuffled if _key(setting) not in self._tried)
        setting = (self._by_tpe and self._proposed()) or next(untried)
        self._tried.add(_key(setting))
        return setting

    def _proposed(self) -> Setting | None:
        copy = optuna.create_study(direction=self._study.direction, sampler=self._study.sampler)
        copy.add_trials(self._study.trials)
        proposals = (_setting(copy.ask(self._distributions).params) for _ in range(PROPOSALS))
        return next((setting for setting in proposals if _key(setting) not in self._tried), None)

    def _trial(self, number: int) -> Trial:
        frozen: FrozenTrial = self._study.trials[number]
        return Trial(self._study, frozen._trial_id)


def _check_same(study: optuna.Study, record: dict[str, str], folder: Path) -> None:
    before: dict[str, str] = study.user_attrs.get(RECORD, {})
    if not study.trials:
        study.set_user_attr(RECORD, record)
        return
    for name in (name for name in {**before, **record} if before.get(name) != record.get(name)):
        raise UsageError(
            f"{folder} holds another sweep: its {name} was {before.get(name, 'not given')}, and is "
            f"{record.get(name, 'not given')} here; give this one another --name"
        )


def _shuffled(space: Space, seed: int) -> Iterator[Setting]:
    """The settings of a grid in a random order; of a large one without an end, a few of them more than once."""
    chance = random.Random(seed)
    if space.size > LISTED:
        return map(space.combination, iter(partial(chance.randrange, space.size), -1))
    return map(space.combination, chance.sample(range(space.size), space.size))


def _key(setting: Setting) -> tuple[tuple[str, str], ...]:
    return (*sorted(setting.items()),)


def _setting(params: dict[str, Any]) -> Setting:
    return {name: value if isinstance(value, str) else repr(value) for name, value in params.items()}


def _distribution(parameter: Values | Range, whole: bool) -> BaseDistribution:
    if isinstance(parameter, Values):
        return CategoricalDistribution(parameter.values)
    if whole:
        step = 1 if parameter.step is None else int(parameter.step)
        return IntDistribution(int(parameter.low), int(parameter.high), parameter.log, step)
    step = None if parameter.step is None else float(parameter.step)
    return FloatDistribution(float(parameter.low), float(parameter.high), parameter.log, step)
