"""The command `cifar-zero compare` trains one recipe under several strategies, or reads existing runs, and prints
whether they agree. See --help."""

import os
import shlex
from argparse import Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from cifar_zero.checkpoints import run_folder
from cifar_zero.comparison import own_module, report, script
from cifar_zero.comparison.cases import RECIPE, RESUMES, plan_cases, random_cases, resolved
from cifar_zero.comparison.launches import train_cases
from cifar_zero.comparison.own_module import STEPS
from cifar_zero.comparison.reading import grouped, load
from cifar_zero.comparison.result import PLAIN, Comparison, Variant
from cifar_zero.comparison.resuming import Continuation, Resolve, with_continuations
from cifar_zero.comparison.trainings import plan, prepare, train_variants
from cifar_zero.config.rules import check_plain_name
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.config.user_classes import PARTS
from cifar_zero.core import exits
from cifar_zero.core.console import command
from cifar_zero.core.errors import RunError, Stopped, UsageError
from cifar_zero.core.hardware import gpu_count, this_computer
from cifar_zero.launch import rank_environment

TRAIN = "cifar_zero.comparison.jobs:train_recipe"
"""The function that each rank calls to train a case of --acceptance, or to train this project's module on the recorded
steps of --script."""

EPILOG = """\
Each training is checked in place. At some of its steps, and with --acceptance and --module at all of them, the loss,
the gradient, the update and the buffers must equal what plain PyTorch computes from the same weights, images and
random numbers.

exit code: 0 if every variant trained and agrees (and reaches --min_accuracy), 1 if a variant did not, or could not be
judged, 2 for wrong usage, or if DeepSpeed cannot train the module at all

examples:
  %(prog)s --strategies baseline deepspeed_stage_1 deepspeed_stage_3_offload --devices 2 --max_steps 500
  %(prog)s --accumulate 1 4 --devices 1 2 --config configs/deepspeed.yaml --seeds 3
  %(prog)s --acceptance --junit comparisons/acceptance.xml
  %(prog)s --acceptance --save_baseline before.safetensors
  %(prog)s --acceptance --against before.safetensors
  %(prog)s --module my_module.py:MyModule --datamodule my_data.py:MyData --module.lr 0.1 --devices 2
  %(prog)s --module my_module.py:MyModule --datamodule my_data.py:MyData --config lightning_cli.yaml
  %(prog)s --script 'old_train.py --lr 0.1' --module my_module.py:MyModule
  %(prog)s --module my_module.py:MyModule --resume_at 10 --resume_under deepspeed_stage_3 --resume_devices 4
  %(prog)s --strategies baseline my_deepspeed.json --junit comparisons/compare.xml
  %(prog)s --runs runs/net-baseline/version_0 runs/net-deepspeed_stage_2/version_3
"""


def main() -> int:
    """Runs the comparison that the command line describes, prints the verdicts and writes the report. Returns the exit
    code, which is 1 if a variant did not train or does not agree."""
    arguments, rest = _parse()
    if rank_environment.is_rank():
        raise UsageError("cifar-zero compare starts the ranks itself: start it once, without torchrun or srun")
    # After a SLURM requeue the comparison starts from the beginning, so its runs must not resume.
    os.environ.pop("SLURM_RESTART_COUNT", None)
    if arguments.acceptance:
        compare = of_cases
    elif arguments.script:
        compare = of_script
    elif arguments.module:
        compare = of_module
    elif arguments.runs:
        compare = of_runs
    else:
        compare = of_trainings
    folder, comparison = compare(arguments, rest)
    if arguments.min_accuracy:
        comparison.require(arguments.min_accuracy)
    from cifar_zero.comparison.page import write_page

    report.show(comparison, folder)
    report.write_comparison(comparison, folder / "comparison.json")
    if arguments.junit:
        report.write_junit(comparison, Path(arguments.junit))
    write_page(comparison, folder)
    if comparison.stopped_by:
        raise Stopped(comparison.stopped_by, f"{folder} has the verdicts on the finished trainings")
    return 0 if comparison.passed else 1


def of_cases(arguments: Namespace, rest: Sequence[str]) -> tuple[Path, Comparison]:
    """Trains the acceptance cases, or the random cases of --fuzz. Returns the folder of the report, and the comparison.
    With --print_cases, prints the code path and the command of each case instead, and exits.

    Args:
        arguments: The options of compare.
        rest: The other words of the command line. They are refused, because the cases have their own flags.
    """
    if rest or arguments.accumulate:
        raise UsageError(f"--acceptance defines the cases itself: leave out {' '.join(rest) or '--accumulate'}")
    if arguments.fuzz:
        if arguments.strategies or arguments.quick or arguments.seeds:
            mistake = "--fuzz draws strategies and recipes at random: leave out --strategies, --quick and --seeds"
            raise UsageError(mistake)
        cases = random_cases(arguments.fuzz, _ranks(arguments))
    else:
        cases = plan_cases(arguments.strategies or (), _ranks(arguments), arguments.quick, arguments.seeds or 1)
    cases = _with_resumes(arguments, cases, resolved)
    if arguments.print_cases:
        print(*(f"{case.name}\n  {case.why}\n  {case.command}" for case in cases), sep="\n")
        raise SystemExit(0)
    folder = run_folder.claim(arguments.out, arguments.name or "acceptance")
    title = f"acceptance: {len(cases)} cases"
    comparison = Comparison(title, RECIPE, PLAIN, cases, **_baselines(arguments))
    return folder, train_cases(comparison, folder, TRAIN)


def of_module(arguments: Namespace, rest: Sequence[str]) -> tuple[Path, Comparison]:
    """Trains a user's module under each strategy. `rest` has options of train and arguments of the user's classes.
    Returns the folder of the report, and the comparison."""
    if arguments.seeds is not None:
        raise UsageError("--seeds does not work with --module, which trains each strategy once: leave it out")
    flags = [*_module_flags(arguments), *rest]
    cases = own_module.plan(arguments.strategies or (), _ranks(arguments), arguments.accumulate or (), flags)
    cases = _with_resumes(arguments, cases, own_module.resolved)
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


def _baselines(arguments: Namespace) -> dict[str, Any]:
    """Returns the options --against and --save_baseline as arguments of `Comparison`. A path is empty if its option is
    not given."""
    return {name: getattr(arguments, name) for name in ("against", "save_baseline")}


def of_script(arguments: Namespace, rest: Sequence[str]) -> tuple[Path, Comparison]:
    """Records the first steps of a training script, and trains a module on these steps. `rest` has options of train and
    arguments of the user's classes. Returns the folder of the report, and the comparison."""
    if arguments.seeds or arguments.accumulate:
        raise UsageError("--seeds and --accumulate do not work with --script, which sets both: leave them out")
    name = Path(shlex.split(arguments.script)[0]).name
    folder = run_folder.claim(arguments.out, arguments.name or Path(name).stem)
    recording = script.record(arguments.script, arguments.steps, folder)
    recording.renames = dict(arguments.rename)
    recording.own_data, recording.is_recipe = arguments.own_data, not arguments.module
    recording.write(folder / script.RECORDING)
    ranks = _ranks(arguments)
    if not arguments.devices and recording.batch_size % ranks:
        ranks = 1
    cases = script.plan(recording, arguments.strategies or (), ranks, [*rest, *_module_flags(arguments)])
    about = {"script": arguments.script, "module": arguments.module or "CIFARModule"}
    about |= {key: str(getattr(recording, key)) for key in ("model", "precision", "accumulate", "gradient_clip_val")}
    comparison = Comparison(f"{name}: {recording.steps} steps", about, name, cases)
    train = TRAIN if recording.is_recipe else own_module.TRAIN
    return folder, train_cases(comparison, folder, train, of_user=True)


def _rename(text: str) -> tuple[str, str]:
    """Returns the two sides of OLD=NEW. Raises UsageError if the text has another form."""
    old, _, new = text.partition("=")
    if not old or "=" not in text:
        raise UsageError(f"--rename {text}: give OLD=NEW, two prefixes of weight names")
    return old, new


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
    axes = (arguments.strategies, arguments.devices, arguments.accumulate, arguments.seeds)
    if rest or any(axis is not None for axis in axes):
        raise UsageError("--runs only reads finished runs: leave out the training flags")
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
    planned = plan(*axes, arguments.seeds or 1, rest, shlex.split(arguments.launcher))
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


def _parse() -> tuple[Namespace, list[str]]:
    parser = exits.Parser(
        prog=command("compare"),
        description="Trains one recipe under several strategies, numbers of ranks or micro-batches, or reads existing "
        "runs, and prints whether they agree: bit by bit, within rounding, or not.",
        epilog=EPILOG,
        usage="%(prog)s --strategies NAME ... [--devices N ...] [--<option of train> VALUE ...]\n"
        "       %(prog)s --runs RUN ...\n"
        "       %(prog)s --acceptance [--quick] [--strategies NAME ...] [--devices N]\n"
        "       %(prog)s --module FILE.py:NAME [--datamodule FILE.py:NAME] [--module.ARGUMENT VALUE ...]\n"
        "       %(prog)s --script FILE.py [--module FILE.py:NAME] [--own_data]",
    )
    add = parser.add_argument
    add("--strategies", nargs="+", metavar="NAME", help="strategies of train, or raw DeepSpeed configurations (*.json)")
    add("--devices", nargs="+", metavar="N", help="numbers of ranks, or NODESxRANKS (default: as for train)")
    add("--accumulate", nargs="+", metavar="N", help="numbers of micro-batches per optimizer step")
    add("--seeds", type=int, metavar="N", help="runs per variant, with seeds counted up from --seed (default: 1)")
    add(
        "--launcher",
        metavar="COMMAND",
        default="",
        help="command that starts the ranks of each run, such as 'srun --nodes 2 --ntasks-per-node 8'",
    )
    mode = parser.add_mutually_exclusive_group().add_argument
    mode("--runs", nargs="+", metavar="RUN", help="compare these run folders; nothing is trained")
    mode("--acceptance", action="store_true", help="train a dozen short recipes under every strategy")
    add("--quick", action="store_true", help="with --acceptance: train three sensitive recipes, resume none")
    add("--fuzz", type=int, metavar="N", help="with --acceptance: train N cases under random placements")
    add("--print_cases", action="store_true", help="with --acceptance: list the cases with their commands and exit")
    mode("--module", metavar="NAME", help="compare your own LightningModule: FILE.py:NAME or PACKAGE.MODULE:NAME")
    add("--datamodule", metavar="NAME", help="LightningDataModule for --module (default: the module's own loader)")
    add(
        "--script",
        metavar="'FILE.py ...'",
        default="",
        help="training script with its arguments, whose steps the module must reproduce",
    )
    add("--steps", type=int, default=STEPS, metavar="N", help="with --script: record N steps (default: %(default)s)")
    add(
        "--rename",
        nargs="+",
        type=_rename,
        default=[],
        metavar="OLD=NEW",
        help="with --script: prefixes of weight names in the script (OLD) and in the module (NEW)",
    )
    add("--own_data", action="store_true", help="with --script: also compare the batches of the module's loader")
    add("--save_baseline", metavar="FILE", default="", help="save the steps of --acceptance or --module for --against")
    add("--against", metavar="FILE", default="", help="compare --acceptance or --module with a file of --save_baseline")
    add(
        "--resume_at",
        type=int,
        metavar="N",
        help="with --acceptance or --module: save each training after step N, resume it and check the rest",
    )
    add("--resume_under", nargs="+", metavar="NAME", help="with --resume_at: also resume under these strategies")
    add("--resume_devices", nargs="+", type=int, metavar="N", help="with --resume_at: also resume on N ranks")
    add(
        "--min_accuracy",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="fail variants with a lower test accuracy (0 to 1), because untrained models agree too",
    )
    add("--junit", metavar="FILE", help="write the verdicts as JUnit XML, for CI systems")
    add("--out", default="comparisons", metavar="DIR", help="directory for comparisons (default: %(default)s)")
    add("--name", default="", metavar="NAME", help="name of this comparison (default: name of the model, or runs)")
    add("--trust", action="store_true", help="load checkpoints that could run code; only if you trust their author")
    arguments, rest = parser.parse_known_args()
    check_plain_name(arguments.name)
    for option in ("seeds", "steps", "fuzz"):
        number = getattr(arguments, option)
        if number is not None and number < 1:
            raise UsageError(f"--{option} must be at least 1, not {number}")
    for option, needed in {
        "quick": "acceptance",
        "fuzz": "acceptance",
        "print_cases": "acceptance",
        "datamodule": "module",
        "rename": "script",
        "own_data": "script",
        "resume_under": "resume_at",
        "resume_devices": "resume_at",
    }.items():
        if getattr(arguments, option) and not getattr(arguments, needed):
            raise UsageError(f"--{option} works only with --{needed}: add --{needed}")
    if AUTO in (*(arguments.strategies or ()), *(arguments.resume_under or ())):
        raise UsageError("--strategies auto cannot be compared: name the strategy that cifar-zero plan recommends")
    if arguments.script and (arguments.acceptance or arguments.runs):
        raise UsageError("--script checks one module: leave out --acceptance and --runs")
    if arguments.own_data and not arguments.module:
        raise UsageError("--own_data works only with --module: add --module")
    if arguments.resume_at is not None and (arguments.script or not (arguments.acceptance or arguments.module)):
        raise UsageError("--resume_at works only with --acceptance or --module, and without --script")
    if min(arguments.resume_devices or [1]) < 1:
        raise UsageError("--resume_devices must be at least 1")
    if not 0 <= arguments.min_accuracy <= 1:
        raise UsageError(f"--min_accuracy {arguments.min_accuracy:g}: give a share from 0 to 1, such as 0.5")
    in_ranks = arguments.acceptance or arguments.module or arguments.script
    if arguments.min_accuracy and in_ranks:
        raise UsageError("--min_accuracy does not work with --acceptance, --module or --script: leave it out")
    if any(_baselines(arguments).values()) and not (arguments.acceptance or arguments.module):
        raise UsageError("--save_baseline and --against work only with --acceptance or --module: add one of them")
    if any(_baselines(arguments).values()) and arguments.script:
        raise UsageError("--save_baseline and --against do not work with --script: leave them out")
    if arguments.launcher and (in_ranks or arguments.runs):
        raise UsageError("--launcher does not work with --acceptance, --module, --script or --runs: leave it out")
    for option in ("junit", "save_baseline"):
        if file := getattr(arguments, option):
            folder = Path(file).absolute().parent
            if not folder.is_dir() and folder != Path(arguments.out).absolute():
                raise UsageError(f"--{option} {file}: its directory does not exist")
            if Path(file).is_dir():
                raise UsageError(f"--{option} {file} is a directory: name a file")
    return arguments, rest
