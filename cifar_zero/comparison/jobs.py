"""Trains cases one after the other in ranks that are started once for each number of ranks, with every step checked."""

import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cifar_zero.comparison.cases import Case
from cifar_zero.comparison.result import Comparison, Variant
from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.core.atomic import write_json
from cifar_zero.core.console import command, quieten
from cifar_zero.core.errors import Stopped
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
    writes their verdicts. Returns the exit code. `file` is JSON: the number of ranks, and of each job its number and
    its flags."""
    work = json.loads(file.read_text())
    if work["ranks"] > 1 and not rank_environment.is_rank():
        return local_launcher.run(work["ranks"], on_cpu=gpu_count() == 0)
    quieten()
    gc.freeze()  # ZeRO 3 (DeepSpeed 0.19.8, defragment) collects garbage at each start: 0.35 s with all imports
    if gpu_count() == 0:
        torch.set_num_threads(1)  # enough for these models, and threads wait for one another on a busy machine
    environment, rank = dict(os.environ), rank_environment.global_rank()
    for job in work["jobs"]:
        os.environ.update(environment)  # Lightning removes WORLD_SIZE at the end of a training
        # With TF32 the bounds of a float32 case would be a thousand times as wide on a GPU (torch, CUDA semantics).
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
            verdict = train(job["flags"], file.parent)
        if rank == 0:
            write_json(_verdict_file(file.parent, job["number"]), verdict.as_dict())
    return 0


def _verdict_file(folder: Path, number: int) -> Path:
    return folder / f"case-{number}.json"


def try_all(
    cases: Sequence[Case], folder: Path, program: Sequence[str], command: str, title: str, recipe: Mapping[str, str]
) -> Comparison:
    """Trains the cases and returns the verdicts; after Ctrl-C those of the finished ones. `folder` receives the logs;
    `program` trains a file of jobs; the rest is for the report."""
    started = time.monotonic()
    stopped_by = 0
    variants = [_variant(case) for case in cases]
    if not torch.cuda.is_available():
        warn_of_few_cores(max(case.ranks for case in cases))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("left"), console=Console(stderr=True)) as progress:
        task = progress.add_task("trainings", total=len(cases))
        try:
            for ranks in dict.fromkeys(case.ranks for case in cases):
                _train(ranks, cases, variants, folder, program, lambda: progress.advance(task))
        except Stopped as stop:
            stopped_by = stop.number
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    trained = int(progress.tasks[0].completed)
    return Comparison(
        title=title,
        command=command,
        machine={"device": device, **this_computer(), "commit": str(git_commit())}
        | {name: str(version) for name, version in versions().items()},
        recipe=dict(recipe),
        reference="plain PyTorch",
        variants=variants,
        notes=[f"{trained} of {len(cases)} trainings in {time.monotonic() - started:.0f} s."],
        stopped_by=stopped_by,
    )


def _variant(case: Case) -> Variant:
    line = command("train", *case.flags) if "--module" not in case.flags else ""
    variant = Variant(case.name, case.strategy, case.ranks, case.accumulate, line, case=case.row)
    variant.judge("not judged", "stopped before it was trained")
    return variant


def _train(
    ranks: int,
    cases: Sequence[Case],
    variants: Sequence[Variant],
    folder: Path,
    program: Sequence[str],
    advance: Callable[[], None],
) -> None:
    """Trains the cases of one number of ranks in ranks that are started once, and again after each that failed; sets
    their verdicts and times, the first with the start."""
    todo = [number for number, case in enumerate(cases) if case.ranks == ranks]
    starts = 0
    while todo:
        log, file = folder / f"{ranks}-ranks-{starts}.log", folder / f"{ranks}-ranks-{starts}.json"
        jobs = [{"number": number, "flags": cases[number].flags} for number in todo]
        file.write_text(json.dumps({"ranks": ranks, "jobs": jobs}))
        starts += 1
        began = time.monotonic()
        with run_process.start(program, [str(file)], log) as child:
            failed = False
            while todo and not failed:
                ended = child.poll() is not None
                verdict = _verdict_file(folder, todo[0])
                if not verdict.exists() and not ended:
                    time.sleep(run_process.POLL_SECONDS)
                    continue
                variant = variants[todo.pop(0)]
                variant.seconds, began = time.monotonic() - began, time.monotonic()
                if verdict.exists():
                    variant.check = json.loads(verdict.read_text())
                    variant.judge(variant.check["outcome"], variant.check["text"])
                    advance()
                else:
                    failed = True
                    variant.judge("not trained", run_process.failure(log, child.returncode))
