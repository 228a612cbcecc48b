"""Trains a recipe with many settings and seeds, side by side where devices allow, and says which setting is best.

python sweep.py --search NAME=VALUES ... [--trials N] [--parallel N] [any flag of train.py]
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import cli
import exits
import launch
from config import Config
from errors import RunError, Stopped, UsageError
from options import flat
from sweeping.metric import METRICS, VALIDATION
from sweeping.planned import check, check_names, flags_of, planned, whole_numbers
from sweeping.space import NOT_SEARCHED, Space, space
from values import check_plain_name

if TYPE_CHECKING:
    from sweeping.result import Result
    from sweeping.study import Study

EPILOG = """\
what is searched: options of train.py by their names, numbers or choices
  optimizer.lr=0.1,0.01,0.001    these values
  optimizer.lr=1e-4..1e-1:log    anything between, evenly over the orders of magnitude
  batch_size=32..256:32          from 32 to 256 in steps of 32
  optimizer=sgd,adam             names; --help of train.py has them
  config=configs/vgg16.yaml,configs/resnet18.yaml    whole recipes
  seed=0,1,2                     each setting is trained with each of them, its figure is the mean

Values alone are a grid: all combinations are tried. With a range there are --trials settings, chosen by --sampler.
Started again with the same command it goes on where it was: what has finished is kept, runs that were cut off go on
from their last checkpoint, settings that failed are tried again. More --trials may be asked for.

exit code: 0 where every setting trained, 1 where one failed, 2 for wrong usage

examples:
  python sweep.py --search optimizer.lr=0.1,0.01,0.001 seed=0,1,2 --epochs 5
  python sweep.py --config configs/resnet18.yaml --data.val_fraction 0.1 --epochs 10 --trials 30 --prune \\
      --search optimizer.lr=1e-3..1:log optimizer.weight_decay=1e-5..1e-2:log model.width=0.25,0.5
  python sweep.py --space space.yaml --parallel 4 --name widths      space.yaml: {model.width: [0.25, 0.5, 1]}
"""

TRIALS = 20
"""Settings of a sweep with a range, where --trials says nothing."""

LOCK = "sweep.lock"


def main() -> int:
    """Prints the settings, the best first; returns the exit code, 1 where one failed."""
    arguments, rest = _parse()
    if launch.is_rank():
        raise UsageError("sweep.py starts the ranks itself: start it once, without torchrun or srun")
    exits.stop_at_signals()
    # A job that SLURM has started again goes on as any sweep does: its runs are told by themselves.
    os.environ.pop("SLURM_RESTART_COUNT", None)
    searched = space(arguments.search or [], arguments.space)
    _settle(arguments, searched)
    check_names(searched)
    configs = check(searched, rest, arguments.metric)
    if arguments.prune and (arguments.metric != VALIDATION or "tensorboard" not in configs[0].logger):
        raise UsageError(f"--prune goes by {VALIDATION} in TensorBoard: leave --metric and --logger out")
    _check_runs(configs, arguments.metric)
    folder = Path(arguments.out) / (arguments.name or configs[0].model.name.replace(":", "-"))
    _make(folder)
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / LOCK, timeout=0):
            return _sweep(arguments, rest, searched, configs, folder)
    except Timeout as error:
        raise UsageError(f"another sweep.py is at work in {folder}: give this one another --name") from error


def _sweep(arguments: Namespace, rest: list[str], searched: Space, configs: Sequence[Config], folder: Path) -> int:
    from sweeping.progress import Progress
    from sweeping.slots import slots
    from sweeping.study import Study
    from sweeping.trials import Trials

    metric = arguments.metric
    record = {**_record(rest, searched), "--metric": metric}
    whole = whole_numbers(searched, configs[0])
    study = Study(folder, record, searched, whole, metric, arguments.sampler, arguments.trials, configs[0].seed)
    runs = study.left * max(1, len(searched.seeds))
    places = slots(configs, arguments.parallel, max(1, runs))
    plan = partial(planned, searched, rest=rest, metric=metric)
    try:
        with Progress(runs) as progress:
            Trials(folder, study, plan, places, metric, arguments.prune, progress).carry_out()
    except (KeyboardInterrupt, Stopped) as stop:
        _tell(study, searched, rest, metric, folder)
        number = signal.SIGINT if isinstance(stop, KeyboardInterrupt) else stop.exit_code - 128
        raise Stopped(number, "the same command goes on with the sweep") from stop
    except OSError as error:
        raise RunError(f"{error.strerror or error} ({error.filename}); the same command goes on") from error
    results = _tell(study, searched, rest, metric, folder)
    return 1 if any(result.state == "failed" for result in results) else 0


def _tell(study: Study, searched: Space, rest: list[str], metric: str, folder: Path) -> list[Result]:
    """Prints and writes what became of the settings."""
    from sweeping import figure, result, summary

    results = result.ranked(study.results(), metric)
    finished = results and results[0].state == "finished"
    best = shlex.join(["python", "train.py", *rest, *flags_of(results[0].setting)]) if finished else ""
    summary.print_summary(results, metric, best, folder)
    command = shlex.join(["python", "sweep.py", *sys.argv[1:]])
    result.write(results, metric, command, best, folder / "sweep.json")
    figure.draw(results, searched, metric, folder / "sweep.png")
    return results


def _check_runs(configs: Sequence[Config], metric: str) -> None:
    """Finds out, before anything is trained, whether the options are known to Lightning, weights and images can be had
    and there will be a validation."""
    from quiet import quieten
    from run_steps import prepare, run_steps

    quieten()
    for config in configs:
        prepare(config)
        epoch = run_steps(replace(config, epochs=1, max_steps=-1))
        if metric == VALIDATION and run_steps(config) < epoch and "val_check_interval" not in config.trainer:
            raise UsageError(
                f"--max_steps {config.max_steps} ends before the first validation, at step {epoch}: a shorter epoch is "
                f"--trainer.limit_train_batches {config.max_steps * config.accumulate}"
            )


def _record(rest: Sequence[str], searched: Space) -> dict[str, str]:
    """What must be the same for a sweep to go on: each option of the first setting, and what is searched."""
    first = flat(cli.parse([*rest, *flags_of(searched.one_by_one()[0])]))
    own = {f"--{name}": str(value) for name, value in first.items() if name not in NOT_SEARCHED}
    for parameter in searched.parameters:
        own.pop(f"--{parameter.name}", None)
        own[f"--search {parameter.name}"] = parameter.written
    return {**own, "--search seed": ",".join(searched.seeds)}


def _settle(arguments: Namespace, searched: Space) -> None:
    """Puts the sampler and the number of settings where they were left open."""
    if arguments.sampler == "grid" and not searched.is_grid:
        raise UsageError("--sampler grid tries all combinations of values: a range has none, use tpe or random")
    arguments.sampler = arguments.sampler or ("grid" if searched.is_grid else "tpe")
    if arguments.sampler == "grid" and arguments.trials is not None:
        raise UsageError("--trials is for random and tpe: a grid tries all combinations of its values")
    arguments.trials = TRIALS if arguments.trials is None else arguments.trials


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {folder} cannot be written ({error.strerror})") from error


def _parse() -> tuple[Namespace, list[str]]:
    parser = exits.Parser(
        prog="sweep.py",
        description="Trains a recipe with many settings and seeds, several runs side by side where devices allow, and "
        "says which setting is best. It can be stopped and started again.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --search NAME=VALUES ... [--trials N] [--parallel N] [--<option of train.py> VALUE ...]",
    )
    parser.add_argument("--search", nargs="+", metavar="NAME=VALUES", action="extend", help="what is searched, below")
    parser.add_argument("--space", default="", metavar="FILE", help="the same from a YAML mapping, NAME: VALUES")
    parser.add_argument(
        "--trials", type=int, metavar="N", help=f"settings of random and tpe, in all (default: {TRIALS})"
    )
    parser.add_argument(
        "--sampler",
        choices=("grid", "random", "tpe"),
        help="grid: all combinations; random; tpe: near the good ones (default: grid of values, tpe with ranges)",
    )
    parser.add_argument(
        "--parallel",
        default="auto",
        metavar="N",
        help="runs at the same time; auto: one for each --devices GPUs, or for as many cores (default: %(default)s)",
    )
    parser.add_argument(
        "--metric",
        default=VALIDATION,
        metavar="KEY",
        help=f"that settings are chosen by: {', '.join(METRICS)} (default: %(default)s, of the last validation)",
    )
    parser.add_argument("--prune", action="store_true", help="end a setting that is behind the median of the others")
    parser.add_argument("--out", default="sweeps", metavar="DIR", help="of sweeps (default: %(default)s)")
    parser.add_argument("--name", default="", metavar="NAME", help="of this one (default: the network's)")
    arguments, rest = parser.parse_known_args()
    check_plain_name(arguments.name)
    if arguments.trials is not None and arguments.trials < 1:
        raise UsageError(f"--trials must be at least 1, not {arguments.trials}")
    if arguments.parallel == "auto":
        arguments.parallel = None
    elif not arguments.parallel.isdecimal() or int(arguments.parallel) < 1:
        raise UsageError(f"--parallel must be auto or at least 1, not {arguments.parallel}")
    else:
        arguments.parallel = int(arguments.parallel)
    return arguments, rest


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
