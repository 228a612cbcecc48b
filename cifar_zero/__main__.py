"""`cifar-zero COMMAND ...`, also `python -m cifar_zero COMMAND ...`: runs a command and imports only what it needs."""

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from cifar_zero.core import exits

COMMANDS = {
    "train": "cifar_zero.train",
    "evaluate": "cifar_zero.training.evaluate",
    "predict": "cifar_zero.exporting.predict",
    "export": "cifar_zero.exporting.export",
    "compare": "cifar_zero.comparison.compare",
    "plan": "cifar_zero.planning.plan",
    "sweep": "cifar_zero.sweeping.sweep",
    "doctor": "cifar_zero.diagnosis.doctor",
}
"""The module of each command, whose `main` returns the exit code."""

SPINS = "10000"
"""How often a thread of a parallel loop looks for the others before it sleeps: libgomp's GOMP_SPINCOUNT, which it reads
when torch is imported. While another program runs, its default, 300,000, keeps a core from the thread that the others
wait for: steps took up to twice as long. A smaller number costs more on an idle machine
(benchmarks/results/performance.md)."""


def main() -> NoReturn:
    """Runs the command that the first argument names."""
    exits.install()
    if sys.argv[1:2] and sys.argv[1].startswith("--local_rank"):  # DeepSpeed's launcher puts it before the command
        sys.argv.append(sys.argv.pop(1))
    parser = argparse.ArgumentParser("cifar-zero", usage="%(prog)s COMMAND ... (COMMAND --help lists its options)")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=", ".join(COMMANDS))
    name = parser.parse_args(sys.argv[1:2]).command
    sys.argv[:2] = [name]
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the classes next to this package, not the current directory's
    run(name)


def run(name: str) -> NoReturn:
    """Runs a command and ends the process with its exit code; its arguments are those of the process."""
    exits.install()  # before the imports, which take a second
    if "OMP_WAIT_POLICY" not in os.environ:  # the user's choice, which has its own number
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    sys.exit(exits.guarded(lambda: import_module(COMMANDS[name]).main()))


if __name__ == "__main__":
    main()
