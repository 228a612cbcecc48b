"""Start-up time: from the command to the end of the first optimizer step, next to the import of the libraries alone;
and the whole time of commands that train nothing, each of which should take less than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

from benchmarks import harness
from benchmarks.harness import Case
from benchmarks.runs import Bench, bench, run
from cifar_zero.core import exits
from cifar_zero.core.hardware import gpu_count

IMPORTS = "python -c 'import torch, lightning'"

ANSWERS = {
    "--help": partial(run, "train.py", "--help"),
    "--print_config": partial(run, "train.py", "--config", "configs/tutorial.yaml", "--print_config"),
    "an unknown option": partial(run, "train.py", "--batch_sise", "8", exit_code=2),
}
"""Commands that train nothing."""


def main() -> int:
    """Measures; returns the exit code."""
    given = harness.parse(harness.parser("startup", __doc__))
    answers = {name: partial(timed, answer) for name, answer in ANSWERS.items()}
    with bench(given.accelerator) as place:
        cases = [first_step(place), Case("whole commands that train nothing (limit: 1 s)", answers)]
        return harness.compare("startup", cases, given)


def first_step(place: Bench) -> Case:
    """Returns the comparison of the starts of trainings, on one rank and on two."""

    def training(strategy: str, ranks: int) -> dict[str, float]:
        figures = place.ours(1, "--strategy", strategy, "--devices", str(ranks))
        return {"seconds": figures["seconds_to_first_step"]}

    runs = {IMPORTS: partial(timed, partial(run, "-c", "import torch, lightning"))}
    runs |= {strategy: partial(training, strategy, 1) for strategy in ("baseline", "deepspeed_stage_2")}
    ratios = [("baseline", IMPORTS), ("deepspeed_stage_2", "baseline")]
    if place.accelerator == "cpu" or gpu_count() > 1:
        runs |= {f"{strategy}, 2 ranks": partial(training, strategy, 2) for strategy in ("ddp", "deepspeed_stage_2")}
        ratios += [("ddp, 2 ranks", "baseline"), ("deepspeed_stage_2, 2 ranks", "deepspeed_stage_2")]
    return Case(f"from the command to the first optimizer step, {place.accelerator}", runs, ratios, "seconds")


def timed(command: Callable[[], str]) -> dict[str, float]:
    """Returns the seconds from the start of a command to its end."""
    started = time.perf_counter()
    command()
    return {"seconds": time.perf_counter() - started}


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
