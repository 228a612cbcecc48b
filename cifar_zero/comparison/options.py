"""Defines the command line of `cifar-zero compare`, and refuses options that do not fit together."""

from argparse import Namespace
from pathlib import Path

from cifar_zero.config.rules import check_plain_name
from cifar_zero.core import exits
from cifar_zero.core.console import command
from cifar_zero.core.errors import UsageError
from stepcheck.report import check_files

OF_TRAININGS = ("strategies", "devices", "accumulate")  # options that do not work with --runs

EPILOG = """\
Each step of each run is audited, and 20 steps (--check_steps) are computed again by plain PyTorch from the same
weights, images and random numbers.

exit code: 0 if every variant trained and agrees (and reaches --min_accuracy), 1 if a variant did not, or could not be
judged, 2 for wrong usage

examples:
  %(prog)s --strategies baseline deepspeed_stage_1 deepspeed_stage_3_offload --devices 2 --max_steps 500
  %(prog)s --accumulate 1 4 --devices 1 2 --config configs/deepspeed.yaml
  %(prog)s --strategies baseline my_deepspeed.json --junit comparisons/compare.xml
  %(prog)s --runs runs/net-baseline/version_0 runs/net-deepspeed_stage_2/version_3
"""


def parse() -> tuple[Namespace, list[str]]:
    """Returns the options of compare, and the other words of the command line, which are options of train. Raises
    UsageError if an option has a wrong value, if options do not fit together, or if the file of --junit cannot be
    written."""
    parser = exits.Parser(
        prog=command("compare"),
        description="Trains one recipe under several strategies, numbers of ranks or micro-batches, or reads existing "
        "runs, and prints whether they agree, with their speed, memory and accuracy.",
        epilog=EPILOG,
        usage="%(prog)s --strategies NAME ... [--devices N ...] [--<option of train> VALUE ...]\n"
        "       %(prog)s --runs RUN ...",
    )
    add = parser.add_argument
    strategies = "strategies of train, or raw DeepSpeed configurations (*.json)"
    add("--strategies", nargs="+", default=[], metavar="NAME", help=strategies)
    add("--devices", nargs="+", default=[], metavar="N", help="numbers of ranks (default: as for train)")
    add("--accumulate", nargs="+", default=[], metavar="N", help="numbers of micro-batches per optimizer step")
    add("--runs", nargs="+", metavar="RUN", help="compare these run folders, without training")
    add(
        "--min_accuracy",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="fail variants with a lower test accuracy (0 to 1), because untrained models agree too",
    )
    add("--junit", type=Path, metavar="FILE", help="write the verdicts as JUnit XML, for CI systems")
    add("--out", default="comparisons", metavar="DIR", help="directory for comparisons (default: %(default)s)")
    add("--name", default="", metavar="NAME", help="name of this comparison (default: name of the model, or runs)")
    add("--trust", action="store_true", help="load checkpoints that could run code; only if you trust their author")
    arguments, rest = parser.parse_known_args()
    check_plain_name(arguments.name)
    if not 0 <= arguments.min_accuracy <= 1:
        raise UsageError(f"--min_accuracy {arguments.min_accuracy:g}: give a share from 0 to 1, such as 0.5")
    check_files(arguments)
    if arguments.runs:
        for option in OF_TRAININGS:
            if getattr(arguments, option):
                raise UsageError(f"--{option} does not work with --runs: leave it out")
        if rest:
            raise UsageError(f"--runs only reads finished runs: leave out {' '.join(rest)}")
    return arguments, rest
