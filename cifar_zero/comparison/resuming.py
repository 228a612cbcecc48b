"""Plans the resumed trainings of `cifar-zero compare`, which are saved after a step and continued in new processes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cifar_zero.comparison.reading import counted
from cifar_zero.comparison.result import Variant
from cifar_zero.config.command_line import strategy_flags
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_rules import why_not_resumed
from cifar_zero.core.console import command
from cifar_zero.core.errors import RunError, UsageError

if TYPE_CHECKING:
    from cifar_zero.step_check.resume_check import ResumeCheck

SAVES, CONTINUES = "--saves", "--continues"
"""First element of `Variant.resume`. The step and a name follow SAVES, and the same name follows CONTINUES."""

FOLDER = "resumed"  # folder of the saved trainings, in the comparison's folder

Resolve = Callable[[list[str]], Run]  # returns the run of a case's flags, or raises UsageError


@dataclass(frozen=True)
class Continuation:
    """Where and how a training is continued."""

    at: int  # the optimizer step after which it is saved
    under: str = ""  # strategy of the continuation; by default the same
    ranks: int = 0  # ranks of the continuation; by default the same number
    row: str = ""  # continue only the cases of this row of the acceptance
    of: str = ""  # continue only the cases of this strategy and of its offloaded forms
    why: str = ""


def with_continuations(cases: Sequence[Variant], resume: Continuation, resolve: Resolve) -> list[Variant]:
    """Returns the cases, followed by the cases that continue them. Raises UsageError if no case can be continued and
    `resume` names no row."""
    found, refused = [*cases], None
    for case in cases:
        matches = case.row.startswith(resume.row) and case.strategy.startswith(resume.of)
        elsewhere = case.strategy != resume.under or resume.ranks
        if matches and elsewhere and CONTINUES not in case.resume:
            try:
                found.append(_continuation(case, resume, resolve))
            except UsageError as error:
                refused = refused or error
    if refused and len(found) == len(cases) and not resume.row:
        raise refused
    return found


def _continuation(case: Variant, resume: Continuation, resolve: Resolve) -> Variant:
    """Marks a case to be saved, and returns the case that continues it. The number of micro-batches per step, over all
    ranks, stays the same."""
    ranks = resume.ranks or case.world_size
    before = resolve(case.flags)
    parts, left = divmod(case.world_size * before.placement.accumulate, ranks)
    if left:
        raise UsageError(f"--resume_devices {ranks} does not divide the micro-batches of a step: change --accumulate")
    flags = [*case.flags, "--devices", str(ranks), "--accumulate", str(parts)]
    if resume.under:
        flags += strategy_flags(resume.under)
    for run in (before, resolve(flags)):
        if why := why_not_resumed(run):
            raise UsageError(f"--resume_at: {why}")
    last = before.recipe.max_steps - 1
    if not 1 <= resume.at <= last:
        raise UsageError(f"--resume_at {resume.at} must be from 1 to {last}, so that a step follows")
    name = re.sub(r"\W+", "-", case.name)
    case.resume = [SAVES, str(resume.at), name]
    how = f"resumed at step {resume.at}"
    if resume.under:
        how += f" under {resume.under}"
    if resume.ranks:
        how += f" on {counted(ranks, 'rank', 'ranks')}"
    again = ""
    if case.command:
        again = f"{case.command} --max_steps {resume.at} --name {name} && "
        again += command("train", *flags, "--resume", "last", "--name", name)
    title, row, resume_flags = f"{case.name}, {how}", f"{case.row}, {how}", [CONTINUES, name]
    return Variant(title, case.strategy, ranks, flags, again, row=row, resume=resume_flags, phase=1)


def of_job(flags: list[str], folder: Path) -> tuple["ResumeCheck | None", list[str]]:
    """Returns a pair. The first is the ResumeCheck of a job that saves or continues a training, else None. The second
    is the job's flags without those of `Variant.resume`. Raises RunError if the training that it continues was not
    saved."""
    # Imported here, because the command line is read without torch.
    from cifar_zero.step_check.resume_check import STATE, ResumeCheck

    if flags[0] == SAVES:
        return ResumeCheck(folder / FOLDER / flags[2], int(flags[1])), flags[3:]
    if flags[0] != CONTINUES:
        return None, flags
    saved = folder / FOLDER / flags[1]
    if not (saved / STATE).is_file():
        raise RunError("the training to resume was not saved, or did not finish")
    return ResumeCheck(saved), flags[2:]
