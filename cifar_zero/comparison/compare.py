"""The command `cifar-zero compare` trains one recipe under several strategies, or reads existing runs, and prints
whether they agree. See --help."""

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from cifar_zero.checkpoints import run_folder
from cifar_zero.comparison import report
from cifar_zero.comparison.options import parse
from cifar_zero.comparison.reading import load_run, variants_of
from cifar_zero.comparison.result import Variant
from cifar_zero.comparison.trainings import plan_variants, prepare, train_variants
from cifar_zero.config import ds_config
from cifar_zero.core.console import command
from cifar_zero.core.errors import Stopped, UsageError
from cifar_zero.launch import rank_environment


def main() -> int:
    """Runs the comparison that the command line describes, prints the verdicts and writes the report. Returns the exit
    code, which is 1 if a variant did not train, does not agree, could not be judged or does not reach
    --min_accuracy."""
    arguments, rest = parse()
    if rank_environment.is_rank():
        raise UsageError("cifar-zero compare starts the ranks itself: start it once, without torchrun or srun")
    # After a SLURM requeue the comparison starts from the beginning, so its runs must not resume.
    os.environ.pop("SLURM_RESTART_COUNT", None)
    if arguments.runs:
        return judge(arguments, *of_runs(arguments))
    return judge_trainings(arguments, rest)


def judge(arguments: Namespace, folder: Path, variants: list[Variant]) -> int:
    """Judges variants, prints the verdicts, and writes comparison.json and losses.png into `folder` and the file of
    --junit. Returns the exit code."""
    from cifar_zero.comparison.finished_runs import summarize  # here, because it imports torch
    from cifar_zero.comparison.plot import write_plot  # here, because it imports matplotlib

    comparison = summarize(variants, arguments.trust)
    comparison.notes += [ds_config.summary(file) for file in arguments.strategies if file.endswith(".json")]
    if arguments.min_accuracy:
        comparison.require(arguments.min_accuracy)
    report.show(comparison, folder)
    report.write_comparison(comparison, folder / "comparison.json")
    if arguments.junit:
        report.write_junit(comparison, arguments.junit)
    write_plot(comparison, folder / "losses.png")
    return 0 if comparison.passed else 1


def of_runs(arguments: Namespace) -> tuple[Path, list[Variant]]:
    """Reads the finished runs that --runs names. A folder with all runs of one name stands for the newest of them.
    Returns a new folder for the report, and a variant for each run. Raises UsageError if there are fewer than two runs,
    or one of them twice."""
    runs = [load_run(run_folder.newest_run(Path(run))) for run in arguments.runs]
    if len({Path(run.folder).resolve() for run in runs}) < len(runs):
        raise UsageError(f"--runs {' '.join(arguments.runs)}: give each run once")
    if len(runs) < 2:
        raise UsageError("--runs: give at least two runs")
    return run_folder.claim(arguments.out, arguments.name or "runs"), variants_of(runs)


def judge_trainings(arguments: Namespace, rest: Sequence[str]) -> int:
    """Trains the variants and judges them. `rest` has the options of train for all variants. Returns the exit code. If
    a signal or an error, such as of a full disk, ends the comparison, the message says how to compare the finished
    runs."""
    if arguments.trust:
        rest = [*rest, "--trust"]
    planned = plan_variants(arguments.strategies, arguments.devices, arguments.accumulate, rest)
    prepare(planned)
    folder = run_folder.claim(arguments.out, arguments.name or planned[0].run.recipe.model_name)
    try:
        return judge(arguments, folder, train_variants(planned, folder))
    except Stopped as stop:
        raise Stopped(stop.number, _how_to_compare(folder)) from stop
    except Exception as error:
        error.add_note(_how_to_compare(folder))
        raise


def _how_to_compare(folder: Path) -> str:
    finished = sorted(str(file.parent) for file in folder.glob(f"*/version_*/{run_folder.METRICS}"))
    if len(finished) < 2:
        return f"the runs are in {folder}"
    return f"to compare the finished runs: {command('compare', '--runs', *finished)}"
