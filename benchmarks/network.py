"""Step times of two ranks over a link that is as fast as it gets, and over a slowed one, next to the time that the
bytes planned by plan.py take.

Makes two hosts on this machine, Linux network namespaces, with one CPU rank in each; needs root, iproute2 and pytest.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from cifar_zero.config import command_line
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core import exits
from cifar_zero.core.errors import RunError
from cifar_zero.planning import network
from cifar_zero.planning.communication import sent_bytes
from tests.helpers import run_folder_of
from tests.wire import TwoRanks, two_ranks

RECIPE = ["--model", "mlp", "--model.hidden", "[512]", "--optimizer", "adam", "--batch_size", "8"]
RECIPE += ["--data.source", "synthetic", "--data.synthetic_size", "640", "--accelerator", "cpu", "--devices", "1"]
"""1.6 million parameters in two matrices: little computing, so that the link decides."""


def main() -> int:
    """Measures; returns the exit code."""
    parser = exits.Parser(prog="python -m benchmarks.network", description=__doc__)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "deepspeed_stage_2", "deepspeed_stage_3"])
    parser.add_argument("--mbit", type=int, default=50, help="per second, of the slowed link (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="timed ones of each run (default: %(default)s)")
    given = parser.parse_args()
    table = Table(
        *("strategy", "step, s", f"at {given.mbit} Mbit/s, s", "difference", "planned, s", "difference / planned"),
        box=box.MARKDOWN,
    )
    try:
        with tempfile.TemporaryDirectory() as folder, two_ranks(Path(folder)) as ranks:
            for strategy in given.strategies:
                flags = [*RECIPE, "--strategy", strategy, "--data.root", folder, "--bench_steps", str(given.steps)]
                fast = _seconds(ranks, flags, Path(folder, f"{strategy}-fast"))
                ranks.hosts.slow(f"{given.mbit}mbit")
                slow = _seconds(ranks, flags, Path(folder, f"{strategy}-slow"))
                ranks.hosts.mend()
                config = command_line.parse([*flags, "--num_nodes", "2"])
                planned = 8 * sent_bytes(STRATEGIES[strategy], config, network.of(config)) / (given.mbit * 1e6)
                figures = (fast, slow, slow - fast, planned, (slow - fast) / planned)
                table.add_row(strategy, *(f"{figure:.2f}" for figure in figures))
    except pytest.skip.Exception as reason:
        raise RunError(f"no two hosts: {reason}") from reason
    Console(width=120).print(table)
    return 0


def _seconds(ranks: TwoRanks, flags: list[str], out: Path) -> float:
    """The median step of a run."""
    ranks.train([*flags, "--out", str(out)])
    return json.loads((run_folder_of(out) / "metrics.json").read_text())["perf/step_time_median_ms"] / 1e3


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
