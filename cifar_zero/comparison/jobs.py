"""Trains cases one after the other in ranks that are started once for each number of ranks, with every step checked."""

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cifar_zero.comparison.result import Comparison, Variant
from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.core.atomic import write_json
from cifar_zero.core.console import quieten
from cifar_zero.core.errors import Stopped, UsageError
from cifar_zero.core.hardware import cpu_name, git_commit, gpu_count, this_computer, versions
from cifar_zero.launch import local_launcher, rank_environment
from cifar_zero.step_check.callback import StepCheck
from cifar_zero.step_check.verdict import Verdict
from cifar_zero.strategies import hooks_of
from cifar_zero.training import DATAMODULE, MODULE, build, run_process
from cifar_zero.training.callbacks.averaging import BatchNormStatistics
from cifar_zero.training.resolve import resolve, warn_of_few_cores

Train = Callable[[list[str], Path], Verdict]
"""Trains a case, given by its flags, with a folder for temporary files; returns its verdict, on every rank."""


def train_recipe(flags: list[str], folder: Path) -> Verdict:
    """Trains a run of this program, given by train's flags, as one rank, without output."""
    run = resolve(command_line.parse(flags))
    check = StepCheck(every=1, on_fault="warn")
    trainer = quiet_trainer(run, folder, [BatchNormStatistics(), check])
    trainer.fit(resolve_name(MODULE)(run, run.num_classes, None), datamodule=resolve_name(DATAMODULE)(run))
    if len(check.verdict.steps) < run.recipe.max_steps:
        check.verdict.note(f"{run.recipe.max_steps - len(check.verdict.steps)} of {run.recipe.max_steps} steps")
    return check.verdict


def quiet_trainer(run: Run, folder: Path, callbacks: Sequence[Any], elements: int = 0, **more: Any) -> Trainer:
    """Returns a Trainer that neither validates nor writes anything; `elements` are those of a model that is not the
    run's, and `more` are options of Lightning's Trainer."""
    quiet = {"enable_checkpointing": False, "limit_val_batches": 0, "logger": False, "default_root_dir": folder}
    run = run.changed(trainer={**run.recipe.trainer, **quiet, **more})
    return build.trainer(run, None, [*callbacks, Free()], elements)


class Free(Callback):
    """Frees an engine with all its tensors, before the next training in this process."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        hooks_of(trainer.strategy).free()


def train_jobs(file: Path, train: Train) -> int:
    """Trains the jobs of a file in the same ranks, which it starts if there are several: that takes seconds. Rank 0
    writes their verdicts. Returns the exit code. `file` is JSON: the number of ranks, and the flags of each job by the
    path of its verdict."""
    work = json.loads(file.read_text())
    if work["ranks"] > 1 and not rank_environment.is_rank():
        return local_launcher.run(work["ranks"], on_cpu=gpu_count() == 0)
    quieten()
    gc.freeze()  # ZeRO 3 (DeepSpeed 0.19.8, defragment) collects garbage at each start: 0.35 s with all imports
    if gpu_count() == 0:
        torch.set_num_threads(1)  # enough for these models, and threads wait for one another on a busy machine
    environment, rank = dict(os.environ), rank_environment.global_rank()
    for verdict_file, flags in work["jobs"].items():
        os.environ.update(environment)  # Lightning removes WORLD_SIZE at the end of a training
        # With TF32 the bounds of a float32 case would be a thousand times as wide on a GPU (torch, CUDA semantics).
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
            verdict = train(flags, file.parent)
        if rank == 0:
            write_json(Path(verdict_file), verdict.as_dict())
    return 0


def train_cases(comparison: Comparison, folder: Path, program: Sequence[str]) -> Comparison:
    """Trains the variants of a comparison, sets their verdicts, and returns it; after Ctrl-C with those of the finished
    ones. `folder` receives the logs; `program` trains a file of jobs. Raises UsageError if the first is refused."""
    started = time.monotonic()
    cases = comparison.variants
    for case in cases:
        case.judge("not judged", "stopped before it was trained")
    if gpu_count() == 0:
        warn_of_few_cores(max(case.world_size for case in cases))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("left"), console=Console(stderr=True)) as progress:
        task = progress.add_task("trainings", total=len(cases))
        try:
            for ranks in dict.fromkeys(case.world_size for case in cases):
                for _ in _train([case for case in cases if case.world_size == ranks], folder, program):
                    progress.advance(task)
        except Stopped as stop:
            comparison.stopped_by = stop.number
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    libraries = {name: str(version) for name, version in versions().items()}
    comparison.machine = {"device": device, **this_computer(), "commit": str(git_commit()), **libraries}
    trained = int(progress.tasks[0].completed)
    comparison.notes.append(f"{trained} of {len(cases)} trainings in {time.monotonic() - started:.0f} s.")
    return comparison


def _train(cases: Sequence[Variant], folder: Path, program: Sequence[str]) -> Iterator[Variant]:
    """Trains cases of one number of ranks in ranks that are started once, and again after each that failed; sets their
    verdicts and times, the first with the start. Yields those that were trained. Raises UsageError if the first one is
    refused: what a user's module cannot do, it can under no strategy."""
    ranks, todo = cases[0].world_size, [*cases]
    while todo:
        name = f"{ranks}-ranks-{len(cases) - len(todo)}"
        log, file = folder / f"{name}.log", folder / f"{name}.json"
        verdicts = [folder / f"{name}-case-{number}.json" for number in range(len(todo))]
        jobs = {str(verdict): case.flags for verdict, case in zip(verdicts, todo, strict=True)}
        file.write_text(json.dumps({"ranks": ranks, "jobs": jobs}))
        began = time.monotonic()
        with run_process.start(program, [str(file)], log) as child:
            for verdict in verdicts:
                while not verdict.exists() and child.poll() is None:
                    time.sleep(run_process.POLL_SECONDS)
                case = todo.pop(0)
                case.seconds, began = time.monotonic() - began, time.monotonic()
                if not verdict.exists():
                    error = run_process.failure(log, child.wait())
                    if case is cases[0] and child.returncode == 2:
                        raise UsageError(error)
                    case.judge("not trained", error)
                    break
                case.check = json.loads(verdict.read_text())
                case.judge(case.check["outcome"], case.check["text"])
                yield case
