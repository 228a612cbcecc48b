"""The command `cifar-zero compare` trains one recipe under several strategies, or reads existing runs, and prints
whether they agree. See --help."""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from cifar_zero.checkpoints import run_folder
from cifar_zero.comparison import own_module, report, script
from cifar_zero.comparison.cases import RECIPE, RESUMES, plan_cases, random_cases, resolved
from cifar_zero.comparison.launches import train_cases
from cifar_zero.comparison.options import mode_of, parse
from cifar_zero.comparison.reading import grouped, load
from cifar_zero.comparison.recording import RECORDING
from cifar_zero.comparison.result import PLAIN, Comparison, Variant
from cifar_zero.comparison.resuming import Continuation, Resolve, with_continuations
from cifar_zero.comparison.trainings import plan, prepare, train_variants
from cifar_zero.config import ds_config
from cifar_zero.core.console import command, say
from cifar_zero.core.errors import RunError, Stopped, UsageError
from cifar_zero.core.hardware import gpu_count, this_computer
from cifar_zero.core.usage import words_of
from cifar_zero.launch import rank_environment
from stepcheck.lightning.case import PARTS

TRAIN = "cifar_zero.comparison.jobs:train_recipe"
"""The function that each rank calls to train a case of --acceptance, or to train this project's module on the recorded
steps of --script."""


OF_ALL_CASES = ("--strategies", "--devices", "--accumulate", "--save_baseline", "--junit")
"""Options that the command of a single case replaces or leaves out."""


def main() -> int:
    """Runs the comparison that the command line describes, prints the verdicts and writes the report. Returns the exit
    code, which is 1 if a variant did not train or does not agree."""
    arguments, rest = parse()
    if rank_environment.is_rank():
        raise UsageError("cifar-zero compare starts the ranks itself: start it once, without torchrun or srun")
    # After a SLURM requeue the comparison starts from the beginning, so its runs must not resume.
    os.environ.pop("SLURM_RESTART_COUNT", None)
    if arguments.print_cases:
        for case in acceptance_cases(arguments, rest):
            print(f"{case.name}\n  {case.why}\n  {case.command}")
        return 0
    compare = {"script": of_script, "acceptance": of_cases, "module": of_module, "runs": of_runs, "": of_trainings}
    folder, comparison = compare[mode_of(arguments)](arguments, rest)
    for file in arguments.strategies or ():
        if file.endswith(".json"):
            comparison.notes.append(ds_config.summary(file, of_module=bool(arguments.module)))
    if arguments.min_accuracy:
        comparison.require(arguments.min_accuracy)
    from cifar_zero.comparison.page import write_page  # here, because it imports matplotlib

    report.show(comparison, folder)
    report.write_comparison(comparison, folder / "comparison.json")
    if arguments.junit:
        report.write_junit(comparison, Path(arguments.junit))
    write_page(comparison, folder)
    if comparison.stopped_by:
        raise Stopped(comparison.stopped_by, f"{folder} has the verdicts on the finished trainings")
    return 0 if comparison.passed else 1


def acceptance_cases(arguments: Namespace, rest: Sequence[str]) -> list[Variant]:
    """Returns the acceptance cases, or the random cases of --fuzz.

    Args:
        arguments: The options of compare.
        rest: The other words of the command line. They are refused, because the cases have their own flags.
    """
    if rest:
        raise UsageError(f"--acceptance defines the cases itself: leave out {' '.join(rest)}")
    if arguments.fuzz:
        if arguments.strategies or arguments.quick or arguments.seeds:
            mistake = "--fuzz draws strategies and recipes at random: leave out --strategies, --quick and --seeds"
            raise UsageError(mistake)
        cases = random_cases(arguments.fuzz, _ranks(arguments))
    else:
        cases = plan_cases(arguments.strategies or (), _ranks(arguments), arguments.quick, arguments.seeds or 1)
    return _with_resumes(arguments, cases, resolved)


def of_cases(arguments: Namespace, rest: Sequence[str]) -> tuple[Path, Comparison]:
    """Trains the acceptance cases. Returns the folder of the report, and the comparison."""
    cases = acceptance_cases(arguments, rest)
    folder = run_folder.claim(arguments.out, arguments.name or "acceptance")
    title = f"acceptance: {len(cases)} cases"
    comparison = Comparison(title, RECIPE, PLAIN, cases, **_baselines(arguments))
    return folder, train_cases(comparison, folder, TRAIN)


def of_module(arguments: Namespace, rest: Sequence[str]) -> tuple[Path, Comparison]:
    """Trains a user's module under each strategy. `rest` has options of train and arguments of the user's classes.
    Returns the folder of the report, and the comparison."""
    flags = [*_module_flags(arguments), *rest]
    cases = own_module.plan(arguments.strategies or (), _ranks(arguments), arguments.accumulate or (), flags)
    cases = _with_resumes(arguments, cases, own_module.resolved)
    _set_commands(cases, arguments)
    name = Path(arguments.module).name.replace(":", "-")
    folder = run_folder.claim(arguments.out, arguments.name or name)
    title = f"{name}, ranks: {cases[0].world_size}, cases: {len(cases)}"
    return folder, own_module.compare(cases, title, folder, **_baselines(arguments))


def _module_flags(arguments: Namespace) -> list[str]:
    """Returns --module and --datamodule, if they are given."""
    flags = []
    for part in PARTS:
        if name := getattr(arguments, part):
            flags += [f"--{part}", name]
    return flags


def _set_commands(cases: Sequence[Variant], arguments: Namespace) -> None:
    """Sets the command that repeats each case of --module or --script alone. Cases that are saved or resumed keep the
    whole command line, because they belong together."""
    paths = {Path(name).stem: name for name in arguments.strategies or ()}
    common, is_left_out = [], False
    for word in sys.argv[1:]:
        if word.startswith("--"):
            is_left_out = word.partition("=")[0] in OF_ALL_CASES
        if not is_left_out:
            common.append(word)
    for case in cases:
        words = [*common, "--strategies", paths.get(case.strategy, case.strategy), "--devices", str(case.world_size)]
        if arguments.accumulate:
            words += ["--accumulate", case.flags[case.flags.index("--accumulate") + 1]]
        case.command = command("compare", *(sys.argv[1:] if case.saved_as else words))


def _baselines(arguments: Namespace) -> dict[str, Any]:
    """Returns the options --against and --save_baseline as arguments of `Comparison`. A path is empty if its option is
    not given."""
    return {name: getattr(arguments, name) for name in ("against", "save_baseline")}


def of_script(arguments: Namespace, rest: Sequence[str]) -> tuple[Path, Comparison]:
    """Records the first steps of a training script, and trains a module on these steps. `rest` has options of train and
    arguments of the user's classes. Returns the folder of the report, and the comparison."""
    module = _module_flags(arguments)
    file = script.check(arguments.script, rest, module)
    folder = run_folder.claim(arguments.out, arguments.name or file.stem)
    recording = script.record(arguments.script, arguments.steps, folder)
    recording.renames, recording.own_data = dict(arguments.rename), arguments.own_data
    recording.write(folder / RECORDING)
    ranks = _ranks(arguments)
    if not arguments.devices and (recording.batch_size % ranks or recording.draws):
        ranks = 1
        if recording.draws:
            say(f"{file.name} draws random numbers, as dropout does, so the module is trained on one rank")
    cases = script.plan(recording, arguments.strategies or (), ranks, [*rest, *module])
    _set_commands(cases, arguments)
    about = {"script": arguments.script, "module": arguments.module or "CIFARModule"}
    about |= {key: str(getattr(recording, key)) for key in ("model", "precision", "accumulate", "gradient_clip_val")}
    comparison = Comparison(f"{file.name}: {recording.steps} steps", about, file.name, cases)
    train = own_module.TRAIN if arguments.module else TRAIN
    return folder, train_cases(comparison, folder, train, of_user=True)


def _ranks(arguments: Namespace) -> int:
    """Returns the number of ranks that --devices gives. The default is one rank per GPU, or two ranks on the CPU."""
    devices = arguments.devices or ["0"]
    if len(devices) > 1 or not devices[0].isdecimal():
        raise UsageError(f"--devices {' '.join(devices)}: give one number for --acceptance, --module and --script")
    return int(devices[0]) or gpu_count() or 2


def _with_resumes(arguments: Namespace, cases: list[Variant], resolve: Resolve) -> list[Variant]:
    """Returns the cases, followed by cases that resume them. --resume_at, --resume_under and --resume_devices define
    after which step, under which strategies and on how many ranks cases are resumed. Without --resume_at, RESUMES
    defines this for the acceptance cases, and with --quick no case is resumed, because new ranks take several seconds
    to start. If a baseline is read or written, no case is resumed either."""
    if any(_baselines(arguments).values()):  # a resumed training keeps no sketches for a baseline
        return cases
    resumes: Sequence[Continuation] = () if arguments.quick else RESUMES
    if arguments.resume_at is not None:
        others = product(arguments.resume_under or [""], arguments.resume_devices or [0])
        resumes = [Continuation(arguments.resume_at, *place) for place in dict.fromkeys([("", 0), *others])]
    for resume in resumes:
        cases = with_continuations(cases, resume, resolve)
    return cases


def of_runs(arguments: Namespace, rest: Sequence[str]) -> tuple[Path, Comparison]:
    """Compares finished runs, which --runs names. Returns the folder of the report, and the comparison."""
    if rest:
        raise UsageError(f"--runs only reads finished runs: leave out {' '.join(rest)}")
    runs = [load(Path(run)) for run in arguments.runs]
    if len({Path(run.folder).resolve() for run in runs}) < len(runs):
        raise UsageError(f"--runs {' '.join(arguments.runs)}: give each run once")
    variants = grouped(runs)
    if len(variants) < 2:
        raise UsageError("--runs: all runs belong to one variant: give runs of at least two")
    from cifar_zero.comparison.finished_runs import summarize

    folder = run_folder.claim(arguments.out, arguments.name or "runs")
    return folder, summarize(variants, arguments.trust)


def of_trainings(arguments: Namespace, rest: Sequence[str]) -> tuple[Path, Comparison]:
    """Trains the variants and compares their runs. `rest` has the options of train for all variants. Returns the folder
    of the runs and of the report, and the comparison."""
    axes = (arguments.strategies or [], arguments.devices or [], arguments.accumulate or [])
    if arguments.trust:
        rest = [*rest, "--trust"]
    launcher = words_of("--launcher", arguments.launcher) if arguments.launcher else ()
    planned = plan(*axes, arguments.seeds or 1, rest, launcher)
    prepare(planned)
    from cifar_zero.comparison.finished_runs import summarize

    folder = run_folder.claim(arguments.out, arguments.name or planned[0].run.recipe.model_name)
    try:
        comparison = summarize(train_variants(planned, folder), arguments.trust)
    except Stopped as stop:
        raise Stopped(stop.number, _how_to_compare(folder)) from stop
    except OSError as error:
        raise RunError(f"{error.strerror or error} ({error.filename}); {_how_to_compare(folder)}") from error
    comparison.machine |= this_computer()
    return folder, comparison


def _how_to_compare(folder: Path) -> str:
    """Returns a hint to print if a comparison was stopped. The hint is the command that compares the finished runs, or
    the folder of the runs if fewer than two are finished."""
    finished = sorted(str(file.parent) for file in folder.glob(f"*/version_*/{run_folder.METRICS}"))
    if len(finished) < 2:
        return f"the runs are in {folder}"
    return f"to compare the finished runs: {command('compare', '--runs', *finished)}"
