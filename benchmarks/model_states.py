"""Model states that ranks hold, measured in real runs, beside what plan.py says of them.

Trains under each strategy for three steps on one CPU rank and on several; prints MB on the rank that holds the most.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.processes import run
from cifar_zero.config import command_line
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core import exits
from cifar_zero.core.errors import RunError
from cifar_zero.planning import network
from cifar_zero.planning.model_states import predicted

STAGES = [f"deepspeed_stage_{stage}" for stage in range(4)]
RECIPE = ["--optimizer", "adamw", "--accelerator", "cpu", "--data.source", "synthetic", "--data.synthetic_size", "640"]
RECIPE += ["--data.val_fraction", "0", "--find_lr", "--max_steps", "3", "--logger", "none"]
"""Three steps without a checkpoint and a test, which would take most of the time."""

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
"""Those that a CPU trains in."""


def main() -> int:
    """Measures; returns the exit code."""
    parser = exits.Parser(prog="python -m benchmarks.model_states", description=__doc__)
    parser.add_argument("--model", default="vit_small", help="network (default: %(default)s)")
    parser.add_argument("--strategies", nargs="+", default=STAGES, choices=STRATEGIES, metavar="NAME")
    parser.add_argument("--ranks", nargs="+", type=_ranks, default=[1, 2, 4], help="numbers of ranks (default: 1 2 4)")
    parser.add_argument("--precisions", nargs="+", default=["32-true", "bf16-mixed"], choices=PRECISIONS)
    given = parser.parse_args()
    table = Table("strategy", "precision", "ranks", "predicted, MB", "measured, MB", "difference", box=box.MARKDOWN)
    progress = Console(stderr=True, highlight=False)
    for strategy in given.strategies:
        for precision in given.precisions:
            for ranks in given.ranks:
                flags = ["--model", given.model, "--strategy", strategy, "--precision", precision, *RECIPE]
                flags += ["--devices", str(ranks), "--batch_size", str(ranks)]
                progress.print(f"{strategy}, {precision}, {ranks} ranks", soft_wrap=True)
                said, held = _predicted(flags), _measured(flags)
                figures = (f"{said / 1e6:,.1f}", f"{held / 1e6:,.1f}", f"{held / said - 1:+.1%}")
                table.add_row(strategy, precision, str(ranks), *figures)
    Console(width=120).print(table)
    return 0


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of ranks")
    return int(text)


def _predicted(flags: list[str]) -> int:
    config = command_line.parse(flags)
    weights = network.of(config).weights
    states = predicted(config.strategy, weights, config.world_size, config.precision, config.optimizer)
    if states is None:
        raise RunError(f"there is no formula for {config.strategy}")
    return states.in_memory.total


def _measured(flags: list[str]) -> int:
    """Bytes on the rank that holds the most."""
    with tempfile.TemporaryDirectory() as folder:
        one_thread = {"OMP_NUM_THREADS": "1"}  # ranks share the cores, and nothing is timed
        run("train.py", *flags, "--data.root", folder, "--out", folder, environment=one_thread)
        (file,) = Path(folder).glob("*/version_*/metrics.json")
        return max(json.loads(file.read_text())["mem/model_state_rank_bytes"])


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
