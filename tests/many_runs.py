"""Several runs of train.py one after the other in the same ranks: what takes a run seconds is its start.

`python -m tests.many_runs FILE`: a JSON list of command lines, all of the same number of ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import checks
import cli
import exits
import launch
import train
from callbacks.figures import TestFigures


def main() -> int:
    """Runs them all; returns the exit code."""
    configs = [cli.parse(flags) for flags in json.loads(Path(sys.argv[1]).read_text())]
    checks.settle(configs[0])
    if configs[0].world_size > 1 and not launch.is_rank():
        return launch.run(configs[0].world_size, on_cpu=True)
    TestFigures.on_test_end = lambda self, trainer, pl_module: None  # most of a short run; tests/callbacks has them
    train.leave = lambda trainer: trainer.strategy.barrier()  # the process group stays for the next one
    environment = dict(os.environ)
    for config in configs:
        os.environ.update(environment)  # Lightning takes WORLD_SIZE away at the end of a run
        checks.settle(config)
        train.train(config)
    return 0


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
