"""Plans the cases of `cifar-zero compare` that are saved after a step and resumed in new processes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cifar_zero.comparison.reading import counted
from cifar_zero.comparison.result import Variant
from cifar_zero.config.command_line import strategy_flags
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_rules import why_not_resumed
from cifar_zero.core.console import command
from cifar_zero.core.errors import UsageError

SAVED = "resumed"  # folder of the saved runs, in the comparison's folder

Resolve = Callable[[Sequence[str]], Run]  # returns the run of a case's flags; raises UsageError if it cannot run


@dataclass(frozen=True)
class Continuation:
    """Describes which cases are saved and resumed, after which step, and under which strategy and number of ranks."""

    at: int  # the optimizer step after which it is saved
    under: str = ""  # strategy of the resumed case; by default the strategy of the saved case
    ranks: int = 0  # number of ranks of the resumed case; by default the number of the saved case
    row: str = ""  # resume only the acceptance cases of this row
    of: str = ""  # resume only the cases of this strategy and of its offloaded forms
    why: str = "restoring the checkpoint"  # the code path that the resumed case executes


def with_continuations(cases: Sequence[Variant], resume: Continuation, resolve: Resolve) -> list[Variant]:
    """Returns the cases, followed by the cases that resume them as `resume` describes. Raises UsageError if no case can
    be resumed and `resume` names no row."""
    found, refused = [*cases], None
    for case in cases:
        matches = case.row.startswith(resume.row) and case.strategy.startswith(resume.of)
        elsewhere = case.strategy != resume.under or resume.ranks
        if matches and elsewhere and not case.continues:
            try:
                found.append(_continuation(case, resume, resolve))
            except UsageError as error:
                refused = refused or error
    if refused and len(found) == len(cases) and not resume.row:
        raise refused
    return found


def _continuation(case: Variant, resume: Continuation, resolve: Resolve) -> Variant:
    """Marks a case to be saved, and returns the case that resumes it. The number of micro-batches per step, over all
    ranks, stays the same. Raises UsageError if the case cannot be resumed as `resume` describes."""
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
    case.saved_as, case.save_at = name, resume.at
    how = f"resumed at step {resume.at}"
    if resume.under:
        how += f" under {resume.under}"
    if resume.ranks:
        how += f" on {counted(ranks, 'rank', 'ranks')}"
    again = ""
    if case.command:
        again = f"{case.command} --max_steps {resume.at} --name {name} && "
        again += command("train", *flags, "--resume", "last", "--name", name)
    title, row = f"{case.name}, {how}", f"{case.row}, {how}"
    return Variant(title, case.strategy, ranks, flags, again, row=row, why=resume.why, saved_as=name)
