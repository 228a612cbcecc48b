"""Runs a command, as `cifar-zero COMMAND ...` or `python -m cifar_zero COMMAND ...`. Imports only the module of this
command."""

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from cifar_zero.core import exits
from cifar_zero.core.console import quieten
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import nearest

COMMANDS = {
    "train": "cifar_zero.train",
    "evaluate": "cifar_zero.training.evaluate",
    "predict": "cifar_zero.exporting.predict",
    "export": "cifar_zero.exporting.export",
    "compare": "cifar_zero.comparison.compare",
    "plan": "cifar_zero.planning.plan",
    "doctor": "cifar_zero.diagnosis.doctor",
}
"""The module of each command. Its function `main` runs the command and returns the exit code."""

SPINS = "10000"
"""Value of GOMP_SPINCOUNT, which libgomp reads when torch is imported: how often a thread in a parallel loop polls for
the others before it sleeps. With libgomp's default of 300,000, threads that poll while another program runs take a core
from the slowest thread, and steps took up to twice as long. A number smaller than 10,000 costs more on an idle machine
(benchmarks/results/performance.md)."""


def main() -> NoReturn:
    """Runs the command whose name is the first argument of the program, and ends the process. The exit code is 2 if
    there is no such command."""
    if sys.argv[1:2] and sys.argv[1].startswith("--local_rank"):  # DeepSpeed's launcher puts it before the command
        sys.argv.append(sys.argv.pop(1))
    parser = argparse.ArgumentParser("cifar-zero", usage="%(prog)s COMMAND ... (COMMAND --help lists its options)")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=", ".join(COMMANDS))
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name and name not in COMMANDS and not name.startswith("-"):
        print(f"error: unknown command {name}: {nearest(name, COMMANDS)}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    name = parser.parse_args(sys.argv[1:2]).command
    sys.argv[:2] = [name]
    sys.path.insert(0, str(Path(__file__).parents[1]))  # finds cifar_module.py and datamodule.py in any directory
    run(name)


def run(name: str) -> NoReturn:
    """Runs the command `name` and ends the process as `exits.run` does. The command takes its arguments from
    `sys.argv[1:]`."""
    exits.install()  # before the imports, which take a second
    if "OMP_WAIT_POLICY" not in os.environ:  # a user's OMP_WAIT_POLICY implies its own spin count
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    quieten()
    exits.run(lambda: import_module(COMMANDS[name]).main())


if __name__ == "__main__":
    main()
