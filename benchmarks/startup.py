"""How long it takes until something happens: from the command to the first optimizer step, against the import of the
libraries alone; and to the end of commands that train nothing, of which each should take less than a second."""

from __future__ import annotations

import sys
from functools import partial

from benchmarks import harness, options, processes
from benchmarks.case import Case, Ratio
from benchmarks.contenders import Bench, bench
from cifar_zero.core import exits
from cifar_zero.core.hardware import gpu_count

BATCH_SIZE = 4
IMPORTS = "python -c 'import torch, lightning'"

ANSWERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "--help": (0, ("--help",)),
    "--print_config": (0, ("--config", "configs/tutorial.yaml", "--print_config")),
    "error: unknown option": (2, ("--batch_sise", "8")),
    "error: unknown strategy": (2, ("--strategy", "deepspeed_stage_4")),
    "error: batch that does not divide": (2, ("--batch_size", "3", "--devices", "2", "--accelerator", "cpu")),
}
"""Commands that train nothing: exit code and flags."""


def main() -> int:
    """Measures; returns the exit code."""
    given = options.settle(options.parser("startup", __doc__, steps=False).parse_args())
    harness.heed_sigterm()
    with bench(given) as place:
        place.prepare()
        return harness.compare("startup", [first_step(place), answers()], given)


def first_step(place: Bench) -> Case:
    """The start of a training."""
    runs = {
        IMPORTS: imports,
        "baseline": partial(until_first_step, place, "baseline", 1),
        "deepspeed_stage_2": partial(until_first_step, place, "deepspeed_stage_2", 1),
    }
    ratios = [("baseline", IMPORTS), ("deepspeed_stage_2", "baseline")]
    if place.options.accelerator == "cpu" or gpu_count() > 1:
        for strategy, one_rank in (("ddp", "baseline"), ("deepspeed_stage_2", "deepspeed_stage_2")):
            two_ranks = f"{strategy}, 2 ranks"
            runs[two_ranks] = partial(until_first_step, place, strategy, 2)
            ratios.append((two_ranks, one_rank))
    name = f"from the command to the first optimizer step, {place.options.accelerator}"
    return Case(name, runs, [Ratio(over, under, ("seconds",)) for over, under in ratios])


def answers() -> Case:
    """The commands that train nothing."""
    runs = {name: partial(wall_time, exit_code, "train.py", *flags) for name, (exit_code, flags) in ANSWERS.items()}
    return Case("whole commands that train nothing (limit: 1 s)", runs)


def until_first_step(place: Bench, strategy: str, ranks: int) -> dict[str, float]:
    """A run of train.py, of which only the start counts."""
    figures = place.ours(BATCH_SIZE, options.MIN_STEPS, "--strategy", strategy, "--devices", str(ranks))
    return {"seconds": figures["seconds_to_first_step"]}


def imports() -> dict[str, float]:
    """The libraries alone."""
    return wall_time(0, "-c", "import torch, lightning")


def wall_time(exit_code: int, *arguments: str) -> dict[str, float]:
    """Seconds that `python <arguments>` takes until it ends with `exit_code`."""
    return {"seconds": processes.run(*arguments, exit_code=exit_code).seconds}


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
