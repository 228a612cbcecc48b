"""Calls functions on ranks that are started once, because starting ranks takes seconds.

`python -m tests.support.many_runs FOLDER RANKS` reads requests from N.json in the folder, with N counted from 0. A
request is a list of a function's name, as `module:function`, and its arguments. Every rank calls the function. N.done
is created when the function has returned on rank 0. The process group is kept from one request to the next.
"""

import gc
import itertools
import json
import os
import sys
import time
from pathlib import Path
from pkgutil import resolve_name

import pytest

from cifar_zero.config import command_line
from cifar_zero.core import exits
from cifar_zero.launch import local_launcher, rank_environment
from cifar_zero.train import train
from cifar_zero.training.resolve import resolve

POLL_SECONDS = 0.02
IDLE_SECONDS = 900.0
"""Time without a request after which the ranks end, because the process that started them was killed."""


def train_run(flags: list[str], change: str) -> None:
    """Trains as train.py does, but keeps the process group for the next run. `change` names a function that changes
    this program during the run, or is empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cifar_zero.training.callbacks.stop.shutdown", lambda trainer: trainer.strategy.barrier())
        if change:
            resolve_name(change)(patch)
        train(resolve(command_line.parse(flags)))


def main() -> int:
    """Answers all requests and returns the exit code."""
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    if ranks > 1 and not rank_environment.is_rank():
        return local_launcher.run_ranks(ranks, on_cpu=True)
    environment = dict(os.environ)
    gc.freeze()  # ZeRO 3 (DeepSpeed 0.19.8, defragment) runs gc.collect() at each start: 0.35 s with all imports
    for number in itertools.count():
        file = folder / f"{number}.json"
        waited = time.monotonic()
        while not file.exists():
            if time.monotonic() - waited > IDLE_SECONDS:
                return 0
            time.sleep(POLL_SECONDS)
        name, *arguments = json.loads(file.read_text())
        os.environ.update(environment)  # Lightning removes WORLD_SIZE at the end of a run
        resolve_name(name)(*arguments)
        if rank_environment.global_rank() == 0:
            file.with_suffix(".done").touch()
    return 0


if __name__ == "__main__":
    exits.run(main)
