"""Trains the settings that a study asks for, each run in a process group of its own, several side by side."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import atomic
import run_folder
import run_process
from checks.offload import resumes
from errors import UsageError
from run_process import POLL_SECONDS
from run_steps import run_steps
from sweeping import metric
from sweeping.planned import Planned, shown
from sweeping.progress import Progress
from sweeping.result import Run
from sweeping.slots import Slot
from sweeping.space import Setting
from sweeping.study import Study

PRUNING_SECONDS = 2.0
"""Between two looks at the validations of the runs: their event files are read from the start."""


@dataclass
class Trial:
    """A setting whose runs are made."""

    number: int
    setting: Setting
    seeds: int
    runs: list[Run] = field(default_factory=list)
    """That have finished."""
    open: int = 0
    """Runs that wait or train."""
    error: str = ""
    pruned: bool = False


@dataclass
class Job:
    """A run that is to be made."""

    trial: Trial
    planned: Planned
    first: bool
    """Of its setting: whether that is behind the others is told by this run."""

    @property
    def label(self) -> str:
        """In the progress."""
        return shown(self.trial.setting) + f", seed {self.planned.seed}" * (self.trial.seeds > 1)


@dataclass
class Going:
    """A run that trains."""

    job: Job
    process: run_process.Run
    slot: Slot
    steps: int
    """Of the whole run."""


class Trials:
    """Makes the runs; whatever ends it, no process stays behind, and what is not finished can go on.

    Args:
        folder: of the sweep: the run folders and the output of each run go there.
        study: says what to try, and keeps what became of it.
        plan: from a trial's number and setting to its runs; raises UsageError where it cannot be trained.
        slots: the places of the runs that train at the same time.
        figure: the metric.
        prunes: whether a setting that is behind the others is ended.
        progress: shows how far it is.
    """

    def __init__(
        self,
        folder: Path,
        study: Study,
        plan: Callable[[int, Setting], list[Planned]],
        slots: Sequence[Slot],
        figure: str,
        prunes: bool,
        progress: Progress,
    ):
        self._folder, self._study, self._plan, self._metric = folder, study, plan, figure
        self._prunes, self._progress = prunes, progress
        self._free = list(slots)
        self._waiting: deque[Job] = deque()
        self._going: list[Going] = []
        self._next_pruning = 0.0

    def carry_out(self) -> None:
        """Returns when the study asks for nothing more.

        Raises:
            KeyboardInterrupt, Stopped: after the runs have been ended, which save.
        """
        try:
            while self._fill() or self._going:
                time.sleep(POLL_SECONDS)
                for going in [going for going in self._going if going.process.poll() is not None]:
                    self._collect(going)
                if self._prunes and time.monotonic() >= self._next_pruning:
                    self._prune()
                    self._next_pruning = time.monotonic() + PRUNING_SECONDS
                self._progress.show([(each.job.label, self._steps_done(each), each.steps) for each in self._going])
        finally:
            run_process.end([going.process for going in self._going])

    def _fill(self) -> bool:
        """Starts runs in the free slots; returns whether any trains."""
        while self._free:
            if not self._waiting:
                if not self._ask():
                    break
                continue
            job = self._waiting.popleft()
            finished, resume = self._begun(job)
            if finished:
                self._ended(job, finished)
                continue
            steps, slot = run_steps(job.planned.config), self._free.pop(0)
            flags = [*job.planned.flags, "--out", str(self._folder), "--name", job.planned.name, *resume]
            process = run_process.start(run_process.TRAIN, flags, self._log(job), slot.told, slot.cores)
            self._going.append(Going(job, process, slot, steps))
        return bool(self._going)

    def _ask(self) -> bool:
        """Takes up the next trial; returns whether there is one."""
        asked = self._study.ask()
        if asked is None:
            return False
        number, setting = asked
        try:
            planned = self._plan(number, setting)
        except UsageError as error:
            self._study.fail(number, str(error))
            self._progress.ended(shown(setting), str(error))
            return True
        trial = Trial(number, setting, len(planned), open=len(planned))
        self._waiting.extend(Job(trial, each, first=each is planned[0]) for each in planned)
        return True

    def _collect(self, going: Going) -> None:
        self._going.remove(going)
        self._free.append(going.slot)
        run_process.end([going.process])
        job, code = going.job, going.process.returncode
        finished, _ = self._begun(job) if code == 0 else ([], [])
        if finished:
            self._ended(job, finished)
        else:
            self._ended(job, [], run_process.failure(self._log(job), code))

    def _ended(self, job: Job, folders: list[Path], error: str = "") -> None:
        """Keeps what became of a run; with the last of its setting the study is told."""
        trial = job.trial
        trial.open -= 1
        if not trial.pruned and not error:
            try:
                value = metric.read(folders, self._metric)
                seconds = metric.fit_seconds(folders[-1])
                trial.runs.append(Run(job.planned.seed, value, str(folders[-1]), seconds))
                self._progress.ended(job.label, f"{self._metric} {metric.shown(value)}")
            except UsageError as missing:
                error = str(missing)
        if trial.pruned:
            self._progress.ended(job.label, "pruned")
        elif error:
            self._progress.ended(job.label, error)
            trial.error = trial.error or f"seed {job.planned.seed}: " * (trial.seeds > 1) + error
        if trial.error:
            self._drop(trial)
        if trial.open:
            return
        if trial.pruned:
            self._study.prune(trial.number)
        elif trial.error:
            self._study.fail(trial.number, trial.error)
        else:
            self._study.finish(trial.number, sorted(trial.runs, key=lambda run: run.seed))

    def _drop(self, trial: Trial) -> None:
        """Makes no more runs of a setting."""
        dropped = [job for job in self._waiting if job.trial is trial]
        for job in dropped:
            self._waiting.remove(job)
            self._progress.ended(job.label, "left out")
        trial.open -= len(dropped)

    def _prune(self) -> None:
        """Has the settings end that are behind the others, as the validations of their first seed say."""
        for first in [going for going in self._going if going.job.first and not going.job.trial.pruned]:
            trial = first.job.trial
            values = metric.validations(run_process.folders(self._folder, first.job.planned.name))
            if trial.error or not self._study.prunes(trial.number, values):
                continue
            trial.pruned = True
            self._drop(trial)
            for going in self._going:
                if going.job.trial is trial:
                    run_process.ask_to_end(going.process)

    def _steps_done(self, going: Going) -> int:
        found = run_process.folders(self._folder, going.job.planned.name)
        return max(map(run_process.steps_done, found), default=0)

    def _begun(self, job: Job) -> tuple[list[Path], list[str]]:
        """A run that goes on has the seconds of its last part alone: chosen by them, it begins anew."""
        goes_on = resumes(job.planned.config) and self._metric != metric.FIT_SECONDS
        return begun(self._folder, job.planned.name, goes_on)

    def _log(self, job: Job) -> Path:
        return self._folder / f"{job.planned.name}.log"


def begun(folder: Path, name: str, goes_on: bool = True) -> tuple[list[Path], list[str]]:
    """What there is of a run: its folders where it has finished, else the flags with which it goes on.

    What was cut off before its first checkpoint is removed, so that its curves are not there twice, and so is all of a
    run that cannot go on.
    """
    found = run_process.folders(folder, name)
    if any((each / run_folder.METRICS).is_file() for each in found):
        last = max(place for place, each in enumerate(found) if (each / run_folder.METRICS).is_file())
        return found[: last + 1], []
    for each in reversed(found):
        atomic.recover(each)
        if goes_on and _has_checkpoint(each):
            return [], ["--resume", str(each)]
        shutil.rmtree(each)
    return [], []


def _has_checkpoint(folder: Path) -> bool:
    try:
        run_folder.newest_checkpoint(folder)
    except UsageError:
        return False
    return True
