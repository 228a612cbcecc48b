"""Images per second of DeepSpeedExamples' recipe (Adam, WarmupLR, clipping, global batch 16, float32) at each ZeRO
stage: train.py against the loop of its own program.

On the CPU two ranks are compared with two forms of that loop: with a share of the cores for each rank, as ours, and
with threads on all cores for each, as it runs where nobody sets OMP_NUM_THREADS.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks import harness, options
from benchmarks.case import Case, Ratio
from benchmarks.contenders import Bench, bench
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import core_count, gpu_count

BATCH_SIZE = 16
STEPS, SHORT_STEPS = 300, 100
STAGES, SHORT_STAGES = [0, 1, 2, 3], [3]


def main() -> int:
    """Measures; returns the exit code."""
    parser = options.parser("deepspeed", __doc__)
    parser.add_argument(
        "--stages", type=int, nargs="+", choices=range(4), help="ZeRO stages (default: all; with --short 3)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), help="default: 1 2")
    namespace = parser.parse_args()
    given = options.settle(namespace)
    numbers = settle_ranks(namespace.ranks, given)
    stages = namespace.stages or (SHORT_STAGES if given.short else STAGES)
    harness.heed_sigterm()
    with bench(given) as place:
        place.prepare()
        cases = [case(place, stage, ranks) for stage in stages for ranks in numbers]
        return harness.compare("deepspeed", cases, given)


def settle_ranks(ranks: list[int] | None, given: options.Options) -> list[int]:
    """The numbers of ranks that were asked for; by default one and, where there are two devices for them, two.

    Raises UsageError where there are fewer GPUs.
    """
    most = 2 if given.accelerator == "cpu" else min(2, gpu_count())
    if max(ranks or [1]) > most:
        raise UsageError("--ranks 2 needs two GPUs: use --ranks 1, or --accelerator cpu")
    return ranks or list(range(1, most + 1))


def recipe(stage: int, ranks: int) -> list[str]:
    """train.py's flags for the recipe."""
    strategy = ["--strategy", f"deepspeed_stage_{stage}", "--devices", str(ranks)]
    return ["--config", "configs/deepspeed.yaml", "--precision", "32-true", *strategy]


def case(place: Bench, stage: int, ranks: int) -> Case:
    """The comparison at a stage with so many ranks."""
    steps = place.options.steps or (SHORT_STEPS if place.options.short else STEPS)
    ours = partial(place.ours, BATCH_SIZE, steps, *recipe(stage, ranks))
    loop = partial(place.reference, "deepspeed_loop", steps, "--stage", str(stage), "--ranks", str(ranks))
    contenders = {"ours": ours, "DeepSpeedExamples' loop": loop}
    if ranks > 1 and place.options.accelerator == "cpu":
        all_cores = {"OMP_NUM_THREADS": str(core_count())}
        contenders["its loop, all cores for each rank"] = partial(loop, environment=all_cores)
    return Case(
        f"ZeRO stage {stage}, {ranks} rank{'s'[: ranks > 1]}, {place.options.accelerator}",
        contenders,
        [Ratio("ours", name) for name in contenders if name != "ours"],
    )


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
