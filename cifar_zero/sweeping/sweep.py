"""Trains a recipe with many settings and seeds, several runs at a time, and reports which setting is best."""

import argparse
import os
from pathlib import Path

from cifar_zero.config import command_line
from cifar_zero.config.rules.strategy import why_not_resumed
from cifar_zero.config.values import check_plain_name
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError
from cifar_zero.core.programs import command
from cifar_zero.launch import rank_environment
from cifar_zero.sweeping.runs import METRICS, VALIDATION, flags_of, resolved, slots

EPILOG = """\
--search takes options of train.py, each with values or a range:
  optimizer.lr=0.1,0.01,0.001    these values; names too: optimizer=sgd,adam
  optimizer.lr=1e-4..1e-1:log    any number between, evenly over the orders of magnitude
  batch_size=32..256:32          from 32 to 256 in steps of 32
  config=configs/vgg16.yaml,configs/resnet18.yaml    whole recipes
  seed=0,1,2                     trains each setting with each seed and takes the mean

Values alone are a grid: all combinations are trained. With a range, --sampler chooses --trials settings.
The same command resumes a sweep: it keeps finished runs, continues interrupted ones from their last checkpoint and
trains failed ones again.
"""


def main() -> int:
    """Trains the runs; returns the exit code, 1 if a run failed."""
    arguments, rest = _parser().parse_known_args()
    check_plain_name(arguments.name)
    if any(number is not None and number < 1 for number in (arguments.trials, arguments.parallel)):
        raise UsageError("--trials and --parallel must be at least 1")
    if rank_environment.is_rank():
        raise UsageError("sweep.py starts the ranks itself: start it once, without torchrun or srun")
    os.environ.pop("SLURM_RESTART_COUNT", None)  # the sweep resumes its runs itself
    from filelock import FileLock, Timeout

    from cifar_zero.sweeping.report import report
    from cifar_zero.sweeping.trials import SEED, Trials, combinations, enqueue, is_grid, open_study, parse, samples

    space, metric = parse(arguments.search), arguments.metric
    sampler = arguments.sampler or ("grid" if is_grid(space) else "tpe")
    if sampler == "grid" and (arguments.trials or not is_grid(space)):
        raise UsageError("a grid is all combinations of values: with --trials or a range use --sampler random or tpe")
    checked = combinations(space) if sampler == "grid" else samples(space)
    if given := {"out", "name", "hparams"}.intersection(space):
        raise UsageError(f"--search {given.pop()}: sweep.py sets it itself for each run")
    names = [name.removesuffix(".name") for name in space if name not in (SEED, "config")]
    hparams = ["--hparams", *names] if names else []
    planned = [resolved([*rest, *hparams, *flags_of(params)], metric) for params in checked]
    if arguments.prune and (metric != VALIDATION or "tensorboard" not in planned[0].config.logger):
        raise UsageError(f"--prune reads {VALIDATION} from TensorBoard: leave out --metric and --logger")
    folder = Path(arguments.out) / (arguments.name or planned[0].config.model_name)
    folder.mkdir(parents=True, exist_ok=True)
    recipe = command_line.dump(command_line.parse([*rest, *flags_of(checked[0])]))
    record = "\n".join([metric, *arguments.search, recipe])
    resumes = [] if any(map(why_not_resumed, planned)) else ["--resume", "auto"]
    flags = [*rest, *hparams, "--out", str(folder), *resumes]
    try:
        with FileLock(folder / "sweep.lock", timeout=0):
            study = open_study(folder, record, metric)
            to_sample = enqueue(study, space, sampler, arguments.trials or 20, planned[0].config.seed)
            trials = Trials(folder, study, space, metric, flags, arguments.prune, to_sample)
            try:
                trials.train(slots(planned, arguments.parallel, max(1, trials.waiting)))
            finally:  # after Ctrl-C too
                code = report(study, space, metric, rest, folder)
            return code
    except Timeout as error:
        raise UsageError(f"another sweep.py is running in {folder}: choose another --name") from error


def _parser() -> argparse.ArgumentParser:
    parser = exits.Parser(
        prog=command("sweep"),
        description="Trains a recipe with many settings and seeds and reports which setting is best.",
        epilog=EPILOG,
        usage="%(prog)s --search NAME=VALUES ... [--trials N] [--parallel N] [--<option of train.py> VALUE ...]",
    )
    parser.add_argument("--search", nargs="+", metavar="NAME=VALUES", action="extend", required=True, help="see below")
    parser.add_argument("--trials", type=int, metavar="N", help="settings of random and tpe in all (default: 20)")
    parser.add_argument("--sampler", choices=("grid", "random", "tpe"), help="default: grid; with a range tpe")
    parser.add_argument("--parallel", type=int, metavar="N", help="runs at a time (default: as the devices allow)")
    parser.add_argument("--metric", default=VALIDATION, choices=METRICS, help="ranks settings (default: %(default)s)")
    parser.add_argument("--prune", action="store_true", help="end runs that are behind the median of the others")
    parser.add_argument("--out", default="sweeps", metavar="DIR", help="directory of sweeps (default: %(default)s)")
    parser.add_argument("--name", default="", metavar="NAME", help="of this sweep (default: the model's name)")
    return parser
