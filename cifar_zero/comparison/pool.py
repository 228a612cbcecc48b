"""Trains all cases with the same number of ranks in one launch, and reads their verdicts. Importing this module does
not import torch, which the ranks import meanwhile."""

import json
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from pkgutil import resolve_name

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cifar_zero.comparison.result import Comparison, Variant
from cifar_zero.comparison.resuming import FOLDER
from cifar_zero.core.errors import Stopped, UsageError
from cifar_zero.core.hardware import cpu_name, git_commit, gpu_count, gpu_versions, this_computer, versions
from cifar_zero.launch import local_launcher, rank_environment
from cifar_zero.training import run_process
from cifar_zero.training.resolve import warn_of_few_cores

TRAININGS = 500
"""Maximum number of trainings in one launch, after which the ranks are started again. Each of 120 trainings under
random placements left 0.36 MB in a rank, because torch and DeepSpeed keep process groups, and with them modules (torch
2.15, DeepSpeed 0.19.8)."""

TRAIN_JOBS = "train-jobs"
"""First argument of `cifar-zero compare` in the processes that train jobs. A function and a file of jobs follow."""


def program_of(train: str) -> tuple[str, ...]:
    """Returns the program that trains a file of jobs, without the file (see `run_process.start`). `train` is the
    function MODULE:NAME that trains a job (see `jobs.Train`)."""
    return ("cifar_zero", "compare", TRAIN_JOBS, train)


def train_jobs(file: Path, train: str) -> int:
    """Trains all jobs of a file in the same ranks and returns the exit code. Several ranks are started once for all
    jobs, because starting them takes seconds.

    Args:
        file: JSON with the number of ranks, a mapping from the path of each job's verdict to the job's flags, and
            whether to keep the sketches that the jobs write.
        train: MODULE:NAME of the function that trains a job, see `jobs.Train`.
    """
    work = json.loads(file.read_text())
    if work["ranks"] > 1 and not rank_environment.is_rank():
        return local_launcher.run_ranks(work["ranks"], on_cpu=gpu_count() == 0)
    from cifar_zero.comparison.jobs import train_all

    train_all(work["jobs"], resolve_name(train), file.parent, work["sketches"])
    return 0


def train_cases(comparison: Comparison, folder: Path, program: Sequence[str], of_user: bool = False) -> Comparison:
    """Trains the variants of a comparison, sets their verdicts, and returns the comparison. Reads and writes the
    baselines that it names. After Ctrl-C, only the finished variants have verdicts.

    Args:
        comparison: Its variants are trained phase by phase. Within a phase, the launches for different numbers of ranks
            run at the same time.
        folder: Receives the logs.
        program: Trains a file of jobs, see `train_jobs`.
        of_user: Whether the module is a user's. If its first variant is refused, all others would be refused too.

    Raises:
        UsageError: If the first training of a user's module is refused, or the baseline has none of these cases.
    """
    sketches = bool(comparison.against or comparison.save_baseline)
    if comparison.against:
        from cifar_zero.comparison import baseline

        baseline.read(comparison)
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
            for phase in sorted({case.phase for case in cases}):
                groups: dict[int, list[Variant]] = {}
                for case in cases:
                    if case.phase == phase:
                        groups.setdefault(case.world_size, []).append(case)
                refusing = cases[0] if of_user else None
                for _ in _in_turn([_train(group, folder, program, refusing, sketches) for group in groups.values()]):
                    progress.advance(task)
        except Stopped as stop:
            comparison.stopped_by = stop.number
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    device = cpu_name()
    libraries = {name: str(version) for name, version in versions().items()}
    if gpu_count():
        import torch

        device = torch.cuda.get_device_name()
        libraries |= gpu_versions()
    comparison.machine = {"device": device, **this_computer(), "commit": str(git_commit()), **libraries}
    trained = int(progress.tasks[0].completed)
    comparison.notes.append(f"{trained} of {len(cases)} trainings in {time.monotonic() - started:.0f} s.")
    if sketches:
        from cifar_zero.comparison import baseline

        baseline.apply(comparison)
    return comparison


def _in_turn(groups: Sequence[Generator[Variant | None]]) -> Iterator[Variant]:
    """Yields the cases that groups of ranks have trained. The groups run at the same time, because one trains while
    another one starts."""
    with ExitStack() as stack:
        running = [stack.enter_context(closing(group)) for group in groups]
        while running:
            for group in [*running]:
                try:
                    case = next(group)
                except StopIteration:
                    running.remove(group)
                    continue
                if case is not None:
                    yield case
            time.sleep(run_process.POLL_SECONDS)


def _train(
    cases: Sequence[Variant], folder: Path, program: Sequence[str], refusing: Variant | None, sketches: bool
) -> Generator[Variant | None]:
    """Trains cases that have the same number of ranks, and sets their verdicts and times. Yields each case that was
    trained, and None while a case is being trained. The first case's time includes the start of the ranks.

    The ranks are started again after TRAININGS trainings, and after each training that failed. Raises UsageError if the
    case `refusing` is refused.
    """
    ranks, todo = cases[0].world_size, [*cases]
    while todo:
        name = f"{ranks}-ranks-{len(cases) - len(todo)}"
        if cases[0].phase:
            name = f"resumed-{name}"
        log, file = folder / f"{name}.log", folder / f"{name}.json"
        together = todo[:TRAININGS]
        verdicts = [folder / f"{name}-case-{number}.json" for number in range(len(together))]
        jobs = {str(verdict): [*case.resume, *case.flags] for verdict, case in zip(verdicts, together, strict=True)}
        file.write_text(json.dumps({"ranks": ranks, "jobs": jobs, "sketches": sketches}))
        began = time.monotonic()
        with run_process.start(program, [str(file)], log) as child:
            for verdict in verdicts:
                while not verdict.exists() and child.poll() is None:
                    yield None
                case = todo.pop(0)
                case.seconds, began = time.monotonic() - began, time.monotonic()
                if not verdict.exists():
                    error = run_process.failure(log, child.wait())
                    if case is refusing and child.returncode == 2:
                        raise UsageError(error)
                    case.judge("not trained", error)
                    break
                case.check = json.loads(verdict.read_text())
                case.judge(case.check["outcome"], case.check["text"])
                yield case
