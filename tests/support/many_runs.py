"""Trains runs of train.py one after the other in the same ranks, because starting ranks takes seconds. A run does not
end the process group, which distributed/test_exit.py tests.

`python -m tests.support.many_runs FOLDER RANKS` reads requests from N.json in the folder, with N counted from 0. A
request is a list with the name of a function of changes.py, or an empty name, and a list of command lines for RANKS
ranks. N.done is created when their runs have ended.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from pathlib import Path

import pytest

from cifar_zero.config import command_line
from cifar_zero.core import exits
from cifar_zero.launch import local_launcher, rank_environment
from cifar_zero.train import train
from cifar_zero.training.resolve import resolve
from tests.support import changes

POLL_SECONDS = 0.02
IDLE_SECONDS = 900.0
"""Time without a request after which the ranks end, because the process that started them was killed."""


def main() -> int:
    """Runs all requests and returns the exit code."""
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
        change, runs = json.loads(file.read_text())
        with pytest.MonkeyPatch.context() as patch:
            if change:
                getattr(changes, change)(patch)
            for flags in runs:
                os.environ.update(environment)  # Lightning removes WORLD_SIZE at the end of a run
                train(resolve(command_line.parse(flags)), last=False)
        if rank_environment.global_rank() == 0:
            file.with_suffix(".done").touch()
    return 0


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
