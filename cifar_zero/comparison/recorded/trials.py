"""Trains cases with their references, in ranks that are started once for each number of ranks, and judges them."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cifar_zero.comparison.recorded.cases import Case, Job
from cifar_zero.comparison.recorded.judging import first_difference, first_fault, first_infinite, learned
from cifar_zero.comparison.recorded.record import load, record_file
from cifar_zero.comparison.result import Comparison, Variant, Verdict
from cifar_zero.core.console import command
from cifar_zero.core.errors import Stopped
from cifar_zero.core.hardware import cpu_name, this_computer
from cifar_zero.reports.summary import git_commit, versions
from cifar_zero.training import run_process
from cifar_zero.training.resolve import warn_of_few_cores


def try_all(
    cases: Sequence[Case], folder: Path, program: Sequence[str], command: str, title: str, recipe: Mapping[str, str]
) -> Comparison:
    """Trains the cases with their references and returns the verdicts; after Ctrl-C those of the finished ones.
    `folder` receives the records and the logs; `program` trains a file of jobs; the rest is for the report."""
    jobs = [*dict.fromkeys(job for case in cases for job in case.jobs)]
    errors: dict[Job, str] = {}
    seconds: dict[Job, float] = {}
    started = time.monotonic()
    stopped_by = 0
    if not torch.cuda.is_available():
        warn_of_few_cores(max(job.ranks for job in jobs))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("left"), console=Console(stderr=True)) as progress:
        task = progress.add_task("trainings", total=len(jobs))
        try:
            for ranks in dict.fromkeys(job.ranks for job in jobs):
                errors |= _train(ranks, cases, jobs, folder, program, seconds, lambda: progress.advance(task))
        except Stopped as stop:
            stopped_by = stop.number
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    trained = int(progress.tasks[0].completed)
    notes = [f"{trained} of {len(jobs)} trainings in {time.monotonic() - started:.0f} s."]
    variants = [_judged(case, jobs, folder, errors, notes) for case in cases]
    for case, variant in zip(cases, variants, strict=True):
        variant.seconds = seconds.get(case.ours, 0.0)
    return Comparison(
        title=title,
        command=command,
        machine={"device": device, **this_computer(), "commit": str(git_commit())}
        | {name: str(version) for name, version in versions().items()},
        recipe=dict(recipe),
        reference="plain PyTorch",
        variants=variants,
        notes=[*dict.fromkeys(notes)],
        stopped_by=stopped_by,
    )


def _train(
    ranks: int,
    cases: Sequence[Case],
    jobs: Sequence[Job],
    folder: Path,
    program: Sequence[str],
    seconds: dict[Job, float],
    advance: Callable[[], None],
) -> dict[Job, str]:
    """Trains the jobs of one number of ranks in ranks that are started once, and again after each job that failed; adds
    their times to `seconds`, the first with the start. Returns the error lines of the jobs that failed."""
    errors: dict[Job, str] = {}
    todo = [job for job in jobs if job.ranks == ranks]
    while todo:
        log, file = folder / f"{ranks}-ranks-{len(errors)}.log", folder / f"{ranks}-ranks-{len(errors)}.json"
        content = [{"number": jobs.index(job), "flags": job.flags, "perturbed": job.perturbed} for job in todo]
        file.write_text(json.dumps({"ranks": ranks, "jobs": content}))
        began = time.monotonic()
        with run_process.start(program, [str(file)], log) as child:
            while todo and todo[0] not in errors:
                ended = child.poll() is not None
                finished = record_file(folder, jobs.index(todo[0])).exists()
                if finished or ended:
                    now = time.monotonic()
                    seconds[todo[0]], began = now - began, now
                if finished:
                    todo = todo[1:]
                    advance()
                elif ended:
                    errors[todo[0]] = run_process.failure(log, child.returncode)
                else:
                    time.sleep(run_process.POLL_SECONDS)
        judged = [case for case in cases if not errors.keys() & {*case.jobs}]
        todo = [job for job in todo if any(job in case.jobs for case in judged)]
    return errors


def _judged(case: Case, jobs: Sequence[Job], folder: Path, errors: Mapping[Job, str], notes: list[str]) -> Variant:
    """Returns a case with its verdict or why there is none; adds to the notes what to know of its reference."""
    line = command("train", *case.ours.flags) if case.must_learn else ""
    variant = Variant(case.name, case.strategy, case.ours.ranks, case.accumulate, line)
    failed = next((job for job in reversed(case.jobs) if job in errors), None)
    records = [load(file) for job in case.jobs if (file := record_file(folder, jobs.index(job))).exists()]
    if failed is not None:
        variant.error = errors[failed] if failed == case.ours else f"its reference failed: {errors[failed]}"
        variant.verdict = Verdict("not trained")
    elif len(records) < len(case.jobs):
        variant.unjudged = "stopped before it was trained"
    elif not records[0].losses:
        variant.unjudged = "the reference made no optimizer step"
    elif case.ours == case.reference:
        variant.verdict = Verdict("reference")
    else:
        reference, *drifted, ours = records
        fault = first_fault(ours, reference, drifted, case.precision)
        parts = first_difference(ours, reference)
        variant.verdict = Verdict("different" if fault else "within rounding" if parts else "bit-identical")
        failure, infinite = learned(ours, reference), first_infinite(reference, case.precision)
        if fault is not None:
            variant.verdict.first_parting, variant.verdict.remark = fault.step, str(fault)
        elif infinite is not None:
            variant.verdict = None
            variant.unjudged = f"the reference's loss or gradient is NaN or infinite at step {infinite}"
        elif failure and case.must_learn:
            variant.verdict = Verdict("different", remark=failure)
        elif failure:
            notes.append(f"{failure[0].upper()}{failure[1:]}.")
        for repeated in drifted[2:]:
            if (step := first_difference(repeated, reference)) is not None:
                note = f"The reference does not repeat itself from step {step} on: its drift is part of the bounds."
                notes.append(note)
    return variant
