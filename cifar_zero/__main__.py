"""`cifar-zero COMMAND ...` of an installed package, which is `python COMMAND.py ...` of the repository."""

import argparse
import os
import runpy
import sys
from pathlib import Path

from cifar_zero.core import interrupt
from cifar_zero.core.programs import INSTALLED

COMMANDS = ("train", "evaluate", "predict", "export", "compare", "plan", "sweep", "doctor")


def main() -> None:
    """Runs the script of a command, which is installed next to this package, as Python runs a script."""
    interrupt.install()
    parser = argparse.ArgumentParser("cifar-zero", usage="%(prog)s COMMAND ... (COMMAND --help lists its options)")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=", ".join(COMMANDS))
    script = Path(__file__).parents[1] / f"{parser.parse_args(sys.argv[1:2]).command}.py"
    os.environ[INSTALLED] = "1"
    sys.argv[:2] = [str(script)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
