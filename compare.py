"""Trains one recipe under several strategies, or reads runs that are there, and says whether they agree.

python compare.py --strategies NAME NAME ... [--devices N ...] [--accumulate N ...] [--seeds N] [any flag of train.py]
python compare.py --runs RUN RUN ...
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import exits
import launch
import run_folder
from comparison import result
from comparison.variants import ROUNDING, Planned, Training, plan
from errors import RunError, Stopped, UsageError
from hardware import core_count
from values import check_plain_name

if TYPE_CHECKING:
    from comparison.reading import Loaded
    from comparison.result import Comparison
    from comparison.running import Outcome, Runner

EPILOG = """\
exit code: 0 where every variant trained and agrees with the reference, 1 where one did not, 2 for wrong usage

examples:
  python compare.py --strategies baseline deepspeed_stage_1 deepspeed_stage_3_offload --devices 2 --max_steps 500
  python compare.py --accumulate 1 4 --devices 1 2 --config configs/deepspeed.yaml --seeds 3
  python compare.py --strategies baseline my_deepspeed.json --junit compare.xml
  python compare.py --runs runs/net-baseline/version_0 runs/net-deepspeed_stage_2/version_3
"""

JSON = "comparison.json"


def main() -> int:
    """Prints the verdicts; returns the exit code, 1 where a variant did not train or does not agree."""
    arguments, rest = _parse()
    if launch.is_rank():
        raise UsageError("compare.py starts the ranks itself: start it once, without torchrun or srun")
    # A job that SLURM has started again compares from the start: its runs would look for a checkpoint of their own.
    os.environ.pop("SLURM_RESTART_COUNT", None)
    exits.stop_at_signals()
    if arguments.runs:
        folder, comparison = of_runs(arguments, rest)
    else:
        folder, comparison = of_trainings(arguments, rest)
    from comparison import junit, table
    from reports import comparison as report

    table.print_comparison(comparison, folder)
    result.write(comparison, folder / JSON)
    if arguments.junit:
        junit.write(comparison, Path(arguments.junit))
    report.write(comparison, folder)
    return 0 if comparison.passed else 1


def of_runs(arguments: Namespace, rest: Sequence[str]) -> tuple[Path, Comparison]:
    """Compares runs that are there; returns the folder of the report too."""
    axes = (arguments.strategies, arguments.devices, arguments.accumulate, arguments.seeds)
    if rest or any(axis is not None for axis in axes):
        raise UsageError("--runs compares what is there: leave out what is for training")
    if len(arguments.runs) < 2:
        raise UsageError("--runs needs two runs or more")
    from comparison.assembly import assemble
    from comparison.grouping import grouped, second_runs
    from comparison.reading import load

    runs = [load(Path(run), arguments.target_accuracy) for run in arguments.runs]
    if len({loaded.folder.resolve() for loaded in runs}) < len(runs):
        raise UsageError(f"--runs names one twice: {' '.join(arguments.runs)}")
    groups = grouped(runs)
    if len(groups) < 2:
        raise UsageError("--runs names one variant: runs that differ in the seed alone, or in what rounding moved")
    second, notes = second_runs(runs, groups[0])
    folder = run_folder.claim(arguments.out, arguments.name or "runs")
    title = f"{len(groups)} variants"
    comparison = assemble(groups, lambda _: second, title, _command(), arguments.target_accuracy, arguments.trust)
    comparison.notes += notes
    return folder, comparison


def of_trainings(arguments: Namespace, rest: Sequence[str]) -> tuple[Path, Comparison]:
    """Trains and compares; returns the folder of the runs and of the report too."""
    axes = (arguments.strategies or [], arguments.devices or [], arguments.accumulate or [])
    rest = [*rest, *["--trust"] * arguments.trust]
    planned = plan(*axes, 1 if arguments.seeds is None else arguments.seeds, rest)
    config = planned[0].trainings[0].config
    steps = _steps(planned)
    folder = run_folder.claim(arguments.out, arguments.name or config.model.name.replace(":", "-"))
    from comparison.running import Runner

    runs = sum(len(variant.trainings) for variant in planned)
    runner = Runner(folder, runs, steps, config.batch_size)
    try:
        return folder, _trained(arguments, planned, runner)
    except (KeyboardInterrupt, Stopped) as stop:
        number = signal.SIGINT if isinstance(stop, KeyboardInterrupt) else stop.exit_code - 128
        raise Stopped(number, _what_is_there(folder)) from stop
    except OSError as error:
        raise RunError(f"{error.strerror or error} ({error.filename}); {_what_is_there(folder)}") from error


def _trained(arguments: Namespace, planned: Sequence[Planned], runner: Runner) -> Comparison:
    from comparison.assembly import assemble
    from comparison.grouping import Group
    from comparison.running import MOVED
    from run_process import TRAIN

    target, groups = arguments.target_accuracy, []
    notes: list[str] = []
    for variant in planned:
        config = variant.trainings[0].config
        group = Group(variant.name, variant.command)
        group.strategy, group.world_size, group.accumulate = config.strategy_name, config.world_size, config.accumulate
        for training in variant.trainings:
            outcome = runner.run(_label(variant, training), training.name, TRAIN, training.flags)
            loaded, error = _loaded(outcome, target)
            group.loaded += loaded
            group.error = group.error or error
        groups.append(group)

    def second(seeds: set[int]) -> list[Loaded]:
        """The reference moved by one unit of rounding."""
        trainings = [training for training in planned[0].trainings if training.seed in seeds]
        runner.add(len(trainings))
        found: list[Loaded] = []
        for training in trainings:
            label, name = f"rounding of {_label(planned[0], training)}", ROUNDING + training.name
            # It is no variant: its curves would lie among theirs.
            loaded, error = _loaded(runner.run(label, name, MOVED, [*training.flags, "--logger", "none"]))
            found += loaded
            if error:
                notes.append(f"The second run of the reference failed (seed {training.seed}): {error}.")
        return found

    title = f"{planned[0].trainings[0].config.model.name}: {len(groups)} variants"
    comparison = assemble(groups, second, title, _command(), target, arguments.trust)
    comparison.notes += notes
    if comparison.machine:
        comparison.machine["cores"] = str(core_count())
    return comparison


def _loaded(outcome: Outcome, target_accuracy: float | None = None) -> tuple[list[Loaded], str]:
    """The finished run, if it can be read, and else why not."""
    from comparison.reading import load

    if outcome.folder is None:
        return [], outcome.error
    try:
        return [load(outcome.folder, target_accuracy)], ""
    except UsageError as error:
        return [], str(error)


def _steps(planned: Sequence[Planned]) -> int:
    """Optimizer steps of a run; finds out, before anything is trained, whether each variant's options are known to
    Lightning and its weights and images can be had."""
    from quiet import quieten
    from run_steps import prepare, run_steps

    quieten()
    configs = [variant.trainings[0].config for variant in planned]
    for config in configs:
        prepare(config)
    return run_steps(configs[0])


def _label(variant: Planned, training: Training) -> str:
    return variant.name + f", seed {training.seed}" * (len(variant.trainings) > 1)


def _what_is_there(folder: Path) -> str:
    finished = sorted(str(file.parent) for file in folder.glob(f"*/version_*/{run_folder.METRICS}"))
    if len(finished) < 2:
        return f"what was trained is in {folder}"
    return f"to compare what is finished: python compare.py --runs {shlex.join(finished)}"


def _command() -> str:
    return shlex.join(["python", "compare.py", *sys.argv[1:]])


def _parse() -> tuple[Namespace, list[str]]:
    parser = exits.Parser(
        prog="compare.py",
        description="Trains one recipe under several strategies, numbers of ranks or micro-batches, or reads runs that "
        "are there, and says whether they agree: bit by bit, within rounding, or not.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --strategies NAME ... [--devices N ...] [--<option of train.py> VALUE ...] | --runs RUN ...",
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        metavar="NAME",
        help="names as for train.py, or raw DeepSpeed configurations (*.json)",
    )
    parser.add_argument("--devices", nargs="+", metavar="N", help="ranks, one or several numbers (default: train.py's)")
    parser.add_argument("--accumulate", nargs="+", metavar="N", help="micro-batches of a step, one or several numbers")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of each variant, from --seed on (default: 1)")
    parser.add_argument("--runs", nargs="+", metavar="RUN", help="compare these run folders; nothing is trained")
    parser.add_argument(
        "--target_accuracy", type=float, metavar="SHARE", help="of val/acc: the time until then is told"
    )
    parser.add_argument("--junit", metavar="FILE", help="write the verdicts as JUnit XML, for CI systems")
    parser.add_argument("--out", default="comparisons", metavar="DIR", help="of comparisons (default: %(default)s)")
    parser.add_argument("--name", default="", metavar="NAME", help="of this one (default: the network's, or runs)")
    parser.add_argument(
        "--trust", action="store_true", help="load checkpoints that could run code, of somebody you trust"
    )
    arguments, rest = parser.parse_known_args()
    if arguments.target_accuracy is not None and not 0 < arguments.target_accuracy <= 1:
        raise UsageError(f"--target_accuracy must be over 0 and at most 1, not {arguments.target_accuracy:g}")
    check_plain_name(arguments.name)
    if arguments.junit and not Path(arguments.junit).absolute().parent.is_dir():
        raise UsageError(f"--junit {arguments.junit}: there is no such directory")
    if arguments.junit and Path(arguments.junit).is_dir():
        raise UsageError(f"--junit {arguments.junit} is a directory: name a file")
    return arguments, rest


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
