"""Images per second of the tutorial's recipe: train.py against the tutorial's own loop and a bare one, at batch 4."""

from __future__ import annotations

import sys
from functools import partial

from benchmarks import harness, options
from benchmarks.case import Case, Ratio
from benchmarks.contenders import Bench, bench
from cifar_zero.core import exits

BATCH_SIZE = 4
STEPS, SHORT_STEPS = 2000, 500


def main() -> int:
    """Measures; returns the exit code."""
    given = options.settle(options.parser("tutorial", __doc__).parse_args())
    harness.heed_sigterm()
    with bench(given) as place:
        place.prepare()
        return harness.compare("tutorial", [case(place)], given)


def case(place: Bench) -> Case:
    """The comparison."""
    steps = place.options.steps or (SHORT_STEPS if place.options.short else STEPS)
    return Case(
        f"configs/tutorial.yaml, batch {BATCH_SIZE}, {place.options.accelerator}",
        {
            "ours": partial(place.ours, BATCH_SIZE, steps, "--config", "configs/tutorial.yaml"),
            "tutorial loop": partial(place.reference, "tutorial", steps),
            "bare loop": partial(place.reference, "bare", steps, "--batch_size", str(BATCH_SIZE)),
        },
        [Ratio("ours", "tutorial loop"), Ratio("ours", "bare loop")],
    )


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
