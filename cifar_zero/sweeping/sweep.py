"""Trains a recipe with many settings and seeds, which Optuna chooses and records, and reports which setting is best."""

import argparse

from cifar_zero.core import exits
from cifar_zero.core.console import command


def main() -> int:
    """Runs the sweep that the command line describes. Returns the exit code, which is 1 if a setting failed."""
    arguments, rest = _parser().parse_known_args()
    from cifar_zero.sweeping import study  # imported here, because Optuna imports numpy, which --help does not need

    return study.run(arguments, rest)


def _parser() -> argparse.ArgumentParser:
    usage = "%(prog)s --search NAME=VALUES ... [--trials N] [--<option of train> VALUE ...]"
    parser = exits.Parser(prog=command("sweep"), description=__doc__, usage=usage)
    values = "options of train with values (A,B,C) or a range (LOW..HIGH, LOW..HIGH:log, LOW..HIGH:STEP); seed=0,1,2"
    parser.add_argument("--search", nargs="+", metavar="NAME=VALUES", action="extend", required=True, help=values)
    parser.add_argument("--trials", type=int, metavar="N", help="number of settings (default: all, or 20)")
    parser.add_argument("--out", default="sweeps", metavar="DIR", help="directory of sweeps (default: %(default)s)")
    parser.add_argument("--name", default="", metavar="NAME", help="name of this sweep (default: the model's name)")
    return parser
