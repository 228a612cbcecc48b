"""Images per second of DeepSpeedExamples' recipe (Adam, WarmupLR, clipping, global batch 16, float32) at each ZeRO
stage: train.py against the loop of DeepSpeedExamples' program.

On the CPU two ranks are compared with two forms of that loop: each rank uses a share of the cores, as ours does, or
threads on all cores, which is what happens where OMP_NUM_THREADS is not set.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks import harness
from benchmarks.harness import Case
from benchmarks.runs import Bench, bench
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import core_count, gpu_count

STEPS = 300


def main() -> int:
    """Measures; returns the exit code."""
    parser = harness.parser("deepspeed", __doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"timed steps of a run (default: {STEPS})")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=range(4), help="default: 0 1 2 3")
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), help="default: 1, and 2 with two devices")
    given = harness.parse(parser)
    most = 2 if given.accelerator == "cpu" else min(2, gpu_count())
    if max(given.ranks or [1]) > most:
        raise UsageError("--ranks 2 needs two GPUs: use --ranks 1, or --accelerator cpu")
    with bench(given.accelerator) as place:
        numbers = given.ranks or range(1, most + 1)
        cases = [case(place, stage, ranks, given.steps) for stage in given.stages for ranks in numbers]
        return harness.compare("deepspeed", cases, given)


def case(place: Bench, stage: int, ranks: int, steps: int) -> Case:
    """Returns the comparison at a ZeRO stage on a number of ranks."""
    recipe = ["--config", "configs/deepspeed.yaml", "--precision", "32-true"]
    recipe += ["--strategy", f"deepspeed_stage_{stage}", "--devices", str(ranks)]
    loop = partial(place.reference, "deepspeed_loop", steps, "--stage", str(stage), "--ranks", str(ranks))
    contenders = {"ours": partial(place.ours, steps, *recipe), "DeepSpeedExamples' loop": loop}
    if ranks > 1 and place.accelerator == "cpu":
        all_cores = {"OMP_NUM_THREADS": str(core_count())}
        contenders["its loop, all cores for each rank"] = partial(loop, extra_env=all_cores)
    name = f"ZeRO stage {stage}, {ranks} rank{'s'[: ranks > 1]}, {place.accelerator}"
    return Case(name, contenders, [("ours", other) for other in contenders if other != "ours"])


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
