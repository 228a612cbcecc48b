"""Starts the ranks that train the cases of a comparison, and reads the verdicts that they write. All cases with the
same number of ranks share one launch. Importing this module does not import torch, which the ranks import meanwhile.
"""

import json
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cifar_zero.comparison.result import Comparison, Variant
from cifar_zero.comparison.resuming import SAVED
from cifar_zero.core.console import say
from cifar_zero.core.errors import Stopped, UsageError
from cifar_zero.core.hardware import cpu_name, git_commit, gpu_count, gpu_versions, this_computer, versions
from cifar_zero.training import run_process
from cifar_zero.training.resolve import warn_of_few_cores

TRAININGS = 500
"""Maximum number of cases that one launch trains. After them, new ranks are started, because memory is not freed. Each
of 120 cases under random placements left 0.36 MB in a rank, because torch and DeepSpeed keep process groups, and with
them modules (torch 2.15, DeepSpeed 0.19.8)."""


def train_cases(comparison: Comparison, folder: Path, train: str, of_user: bool = False) -> Comparison:
    """Trains the cases of a comparison, sets their verdicts, and returns the comparison. If `against` or
    `save_baseline` of the comparison is set, this baseline is read or written. After Ctrl-C, only the finished cases
    have verdicts.

    Args:
        comparison: Its variants are the cases to train. Launches for different numbers of ranks run at the same time.
            Cases that resume a saved run are trained last, in new processes.
        folder: Receives the logs.
        train: MODULE:NAME of the function that trains a case, see `jobs.Train`.
        of_user: Whether a user's module is trained. If its first case is refused, all others would be refused too.

    Raises:
        UsageError: If the first case of a user's module is refused, or the baseline has none of these cases.
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
            for continued in (False, True):
                groups: dict[int, list[Variant]] = {}
                for case in cases:
                    if case.continues == continued:
                        groups.setdefault(case.world_size, []).append(case)
                refusing = cases[0] if of_user else None
                launches = [_launch(group, folder, train, refusing, sketches) for group in groups.values()]
                for case in _in_turn(launches):
                    progress.advance(task)
                    if not progress.console.is_terminal:  # which shows no progress bar
                        say(f"{progress.tasks[0].completed:.0f}/{len(cases)} {case.name}: {case.kind}")
        except Stopped as stop:
            comparison.stopped_by = stop.number
    shutil.rmtree(folder / SAVED, ignore_errors=True)
    device = cpu_name()
    libraries = {name: str(version) for name, version in versions().items()}
    if gpu_count():
        import torch

        device = torch.cuda.get_device_name()
        libraries |= gpu_versions()
    comparison.machine = {"device": device, **this_computer(), "commit": str(git_commit()), **libraries}
    trained = sum(bool(case.check) for case in cases)
    comparison.notes.append(f"{trained} of {len(cases)} trainings in {time.monotonic() - started:.0f} s.")
    if sketches:
        from cifar_zero.comparison import baseline

        baseline.apply(comparison)
    return comparison


def _in_turn(launches: Sequence[Generator[Variant | None]]) -> Iterator[Variant]:
    """Runs several launches at the same time, so that one can train while another one starts. Yields each finished
    case."""
    with ExitStack() as stack:
        running = [stack.enter_context(closing(launch)) for launch in launches]
        while running:
            for launch in [*running]:
                try:
                    finished = next(launch)
                except StopIteration:
                    running.remove(launch)
                else:
                    if finished is not None:
                        yield finished
            time.sleep(run_process.POLL_SECONDS)


def _launch(
    cases: Sequence[Variant], folder: Path, train: str, refusing: Variant | None, sketches: bool
) -> Generator[Variant | None]:
    """Starts the ranks that train the cases, and sets the verdicts and times of the cases. All cases have the same
    number of ranks. Yields each finished case, and None while a case is being trained. The time of the first case
    includes the start of the ranks.

    The ranks are started again after TRAININGS cases, and after each case that failed to train.

    Args:
        cases: The cases to train.
        folder: Receives the logs and the verdicts.
        train: MODULE:NAME of the function that trains a case, see `jobs.Train`.
        refusing: If this case is refused, UsageError is raised.
        sketches: Whether to write the sketches that a baseline needs.
    """
    ranks, todo = cases[0].world_size, [*cases]
    while todo:
        name = f"{ranks}-ranks-{len(cases) - len(todo)}"
        if cases[0].continues:
            name = f"resumed-{name}"
        log, work_file = folder / f"{name}.log", folder / f"{name}.json"
        jobs = {folder / f"{name}-case-{number}.json": case for number, case in enumerate(todo[:TRAININGS])}
        described = {str(verdict_file): asdict(case) for verdict_file, case in jobs.items()}
        work_file.write_text(json.dumps({"ranks": ranks, "train": train, "jobs": described, "sketches": sketches}))
        began = time.monotonic()
        with run_process.start(["cifar_zero.comparison.case_program"], [str(work_file)], log) as child:
            for verdict_file, case in jobs.items():
                while not verdict_file.exists() and child.poll() is None:
                    yield None
                todo.pop(0)
                case.seconds, began = time.monotonic() - began, time.monotonic()
                if not verdict_file.exists():
                    error = run_process.failure(log, child.wait())
                    if case is refusing and child.returncode == 2:
                        raise UsageError(error)
                    case.judge("not trained", error)
                    yield case
                    break
                case.check = json.loads(verdict_file.read_text())
                case.judge(case.check["outcome"], case.check["text"])
                yield case
