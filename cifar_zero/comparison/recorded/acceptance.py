"""`compare.py --acceptance`: short trainings of many settings under every strategy, for a new machine or release."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cifar_zero.comparison.recorded.cases import BATCH, IMAGES, STEPS, Case, recipes
from cifar_zero.comparison.recorded.judging import first_fault, identical, learned
from cifar_zero.comparison.recorded.record import load, record_file
from cifar_zero.comparison.result import Comparison, Variant, Verdict
from cifar_zero.config import command_line
from cifar_zero.config.run import on_this_machine
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import Stopped, UsageError
from cifar_zero.core.hardware import cpu_name
from cifar_zero.reports.summary import versions
from cifar_zero.training import run_process
from cifar_zero.training.resolve import resolve

WITHOUT = ("baseline", "fsdp", "tensor_parallel", "pipeline")
"""Strategies without cases: the reference, another name of fsdp2, and those that train only vision transformers."""

QUICK_RECIPES = 2
"""Recipes of --quick: the first ones, which cover the most."""

POLL_SECONDS = 0.2

CPU_RANKS = 2


@dataclass(frozen=True)
class Job:
    """A training that a rank is to do."""

    case: Case
    perturbed: bool = False


def plan_cases(strategies: Sequence[str], ranks: int, quick: bool) -> list[Case]:
    """Returns the cases of this machine, those of one number of ranks and recipe next to each other.

    Args:
        strategies: their names; empty: all that can train here.
        ranks: the largest number of ranks; 0: one for each GPU, or two on the CPU.
        quick: whether to leave out most recipes.
    """
    machine = on_this_machine(command_line.parse(["--devices", "auto"]))
    on_gpu = machine.accelerator == "gpu"
    assert isinstance(machine.devices, int)
    ranks = ranks or (machine.devices if on_gpu else CPU_RANKS)
    precisions = ("32-true", "bf16-mixed", "16-mixed") if on_gpu else ("32-true", "bf16-mixed")
    rows = recipes(ranks, precisions)[: QUICK_RECIPES if quick else None]
    names = strategies or [name for name in STRATEGIES if name not in WITHOUT]
    cases = {}
    for row in sorted(rows, key=lambda row: -row["ranks"]):
        for name in names:
            case = Case(name, **row)
            case = next((each for each in (case, replace(case, model="torture")) if not refusal(each)), None)
            # DDP's reference is one process, whose batch norms see other micro-batches.
            if case is not None and not (name == "ddp" and case.model == "torture"):
                cases[case] = None
    return [*cases]


def refusal(case: Case) -> str:
    """Returns why a case cannot be trained here; empty if it can."""
    try:
        resolve(command_line.parse(case.flags))
    except UsageError as error:
        return str(error)
    return ""


def accept(cases: Sequence[Case], folder: Path, program: Sequence[str], command: str) -> Comparison:
    """Trains the cases with their references and returns the verdicts; after Ctrl-C those of the finished ones.

    Args:
        cases: to train.
        folder: receives the records and the logs.
        program: what Python starts to train a file of jobs.
        command: the command that repeats the acceptance.
    """
    jobs = [*dict.fromkeys(job for case in cases for job in jobs_of(case))]
    errors: dict[Job, str] = {}
    started = time.monotonic()
    stopped = False
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("left"), console=Console(stderr=True)) as progress:
        task = progress.add_task("trainings", total=len(jobs))
        try:
            for ranks in dict.fromkeys(job.case.ranks for job in jobs):
                mine = [job for job in jobs if job.case.ranks == ranks]
                errors |= _train(mine, jobs, folder, program, lambda: progress.advance(task))
        except (KeyboardInterrupt, Stopped):
            stopped = True
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    variants = [_judged(case, jobs, folder, errors) for case in cases]
    notes = [f"{len(jobs)} trainings of {STEPS} steps in {time.monotonic() - started:.0f} s."]
    if stopped:
        notes.append("Stopped: what had not been trained yet was not judged.")
    return Comparison(
        title=f"acceptance: {len(cases)} cases",
        command=command,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine={"device": device, **{name: str(version) for name, version in versions().items()}},
        recipe={"steps": str(STEPS), "batch_size": str(BATCH), "images": f"{IMAGES} of noise, learnt by heart"},
        reference="the same recipe in plain PyTorch",
        variants=variants,
        notes=notes,
    )


def jobs_of(case: Case) -> list[Job]:
    """Returns the trainings that a verdict on a case needs."""
    return [Job(case.reference), Job(case.reference, perturbed=True), Job(case)]


def _train(
    todo: Sequence[Job], jobs: Sequence[Job], folder: Path, program: Sequence[str], advance: Callable[[], None]
) -> dict[Job, str]:
    """Trains jobs of one number of ranks in ranks that are started once, and again after each job that failed.

    Returns:
        The error lines of the jobs that failed.
    """
    errors: dict[Job, str] = {}
    while todo:
        ranks = todo[0].case.ranks
        log, file = folder / f"{ranks}-ranks-{len(errors)}.log", folder / f"{ranks}-ranks-{len(errors)}.json"
        content = [{"number": jobs.index(job), "flags": job.case.flags, "perturbed": job.perturbed} for job in todo]
        file.write_text(json.dumps({"ranks": ranks, "jobs": content}))
        child = run_process.start(program, [str(file)], log)
        try:
            while todo:
                ended = child.poll() is not None
                if record_file(folder, jobs.index(todo[0])).exists():
                    todo = todo[1:]
                    advance()
                elif ended:
                    errors[todo[0]] = run_process.failure(log, child.returncode)
                    todo = todo[1:]
                    advance()
                    break
                else:
                    time.sleep(POLL_SECONDS)
        finally:
            run_process.end([child])
    return errors


def _judged(case: Case, jobs: Sequence[Job], folder: Path, errors: Mapping[Job, str]) -> Variant:
    """Returns a case with its verdict, or with the reason why there is none."""
    command = f"python train.py {shlex.join(case.flags)}"
    variant = Variant(case.name, case.strategy, case.ranks, case.accumulate, command)
    needed = jobs_of(case)
    failed = next((job for job in reversed(needed) if job in errors), None)
    records = [load(file) for job in needed if (file := record_file(folder, jobs.index(job))).exists()]
    if failed is not None:
        variant.error = errors[failed] if failed.case == case else f"its reference failed: {errors[failed]}"
        variant.verdict = Verdict("not trained")
    elif len(records) < len(needed):
        variant.unjudged = "stopped before it was trained"
    else:
        reference, perturbed, ours = records
        fault = first_fault(ours, reference, perturbed, case.precision)
        same = identical(ours, reference)
        variant.verdict = Verdict("different" if fault else "bit-identical" if same else "within rounding")
        if fault is not None:
            variant.verdict.first_parting, variant.verdict.remark = fault.step, str(fault)
        elif failure := learned(ours, reference):
            variant.verdict = Verdict("different", remark=failure)
    return variant
