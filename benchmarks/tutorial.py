"""Images per second of the tutorial's recipe: train.py against the tutorial's own loop and a bare one, at batch 4."""

from __future__ import annotations

import sys
from functools import partial

from benchmarks import harness
from benchmarks.harness import Case
from benchmarks.runs import bench
from cifar_zero.core import exits

STEPS = 2000


def main() -> int:
    """Measures; returns the exit code."""
    parser = harness.parser("tutorial", __doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"timed steps of a run (default: {STEPS})")
    given = harness.parse(parser)
    with bench(given.accelerator) as place:
        contenders = {
            "ours": partial(place.ours, given.steps, "--config", "configs/tutorial.yaml"),
            "tutorial loop": partial(place.reference, "tutorial", given.steps),
            "bare loop": partial(place.reference, "bare", given.steps),
        }
        ratios = [("ours", "tutorial loop"), ("ours", "bare loop")]
        case = Case(f"configs/tutorial.yaml, batch 4, {given.accelerator}", contenders, ratios)
        return harness.compare("tutorial", [case], given)


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
