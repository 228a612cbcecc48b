"""Defines the command line of `cifar-zero compare`, and refuses options that do not fit together."""

import os
from argparse import Namespace
from pathlib import Path

from cifar_zero.comparison.own_module import STEPS
from cifar_zero.config.rules import check_plain_name
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.core import exits
from cifar_zero.core.console import command
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import existing_file

WORKS_WITH = {
    "acceptance": ["acceptance"],
    "runs": ["runs"],
    "strategies": ["acceptance", "module", "script", ""],
    "devices": ["acceptance", "module", "script", ""],
    "accumulate": ["module", ""],
    "seeds": ["acceptance", ""],
    "launcher": [""],
    "min_accuracy": ["runs", ""],
    "quick": ["acceptance"],
    "fuzz": ["acceptance"],
    "print_cases": ["acceptance"],
    "resume_at": ["acceptance", "module"],
    "save_baseline": ["acceptance", "module"],
    "against": ["acceptance", "module"],
    "steps": ["script"],
    "rename": ["script"],
    "own_data": ["script"],
}
"""The modes in which an option works, see `mode_of`. The other options work in every mode."""

NEEDS = {"datamodule": "module", "own_data": "module", "resume_under": "resume_at", "resume_devices": "resume_at"}
"""Options that work only if another option is given."""

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


def parse() -> tuple[Namespace, list[str]]:
    """Parses the command line. Returns the options of compare, and the other words, which are options of train and
    arguments of the user's classes. Raises UsageError if an option has a wrong value, or if options do not fit
    together."""
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
    mode = mode_of(arguments)
    given = {option for option, value in vars(arguments).items() if value != parser.get_default(option)}
    for option, modes in WORKS_WITH.items():
        if option in given and mode not in modes:
            if mode in ("", "module") and "" not in modes:  # the option that is missing can be added
                names = " or ".join(f"--{name}" for name in modes)
                raise UsageError(f"--{option} works only with {names}: add {names}")
            raise UsageError(f"--{option} does not work with --{mode}: leave it out")
    for option, needed in NEEDS.items():
        if option in given and needed not in given:
            raise UsageError(f"--{option} works only with --{needed}: add --{needed}")
    if AUTO in (*(arguments.strategies or ()), *(arguments.resume_under or ())):
        raise UsageError("--strategies auto cannot be compared: name the strategy that cifar-zero plan recommends")
    if min(arguments.resume_devices or [1]) < 1:
        raise UsageError("--resume_devices must be at least 1")
    if not 0 <= arguments.min_accuracy <= 1:
        raise UsageError(f"--min_accuracy {arguments.min_accuracy:g}: give a share from 0 to 1, such as 0.5")
    existing_file("--against")(arguments.against)
    for option in ("junit", "save_baseline"):
        if file := getattr(arguments, option):
            if Path(file).is_dir():
                raise UsageError(f"--{option} {file} is a directory: name a file")
            existing = next(folder for folder in Path(file).absolute().parents if folder.exists())
            if not existing.is_dir() or not os.access(existing, os.W_OK):
                raise UsageError(f"--{option} {file} cannot be written: {existing} is not a directory of yours")
    return arguments, rest


def mode_of(arguments: Namespace) -> str:
    """Returns the option that chooses what is compared, or an empty string if variants are trained. A module that is
    compared with a script has the mode script."""
    return next((mode for mode in ("script", "acceptance", "module", "runs") if getattr(arguments, mode)), "")


def _rename(text: str) -> tuple[str, str]:
    """Returns the two sides of OLD=NEW. Raises UsageError if the text has another form."""
    old, _, new = text.partition("=")
    if not old or "=" not in text:
        raise UsageError(f"--rename {text}: give OLD=NEW, two prefixes of weight names")
    return old, new
