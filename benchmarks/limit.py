"""How near train.py comes to the limit of the hardware: against a bare loop over images in memory, at three batches.

The bare loop is plain eager PyTorch with torch's defaults; tuned, it has what makes it faster: the fused optimizer, and
the threads, convolution kernels and memory format that train.py chooses for the batch.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks import harness, options
from benchmarks.case import Case, Ratio
from benchmarks.contenders import Bench, bench
from cifar_zero.core import exits

STEPS = {4: 2000, 64: 500, 512: 100}
"""Timed steps at each batch size."""

SHORT_STEPS = {4: 500, 64: 100, 512: 30}


def main() -> int:
    """Measures; returns the exit code."""
    given = options.settle(options.parser("limit", __doc__).parse_args())
    harness.heed_sigterm()
    with bench(given) as place:
        place.prepare()
        return harness.compare("limit", [case(place, batch_size) for batch_size in STEPS], given)


def case(place: Bench, batch_size: int) -> Case:
    """The comparison at a batch size."""
    steps = place.options.steps or (SHORT_STEPS if place.options.short else STEPS)[batch_size]
    batch = ("--batch_size", str(batch_size))
    return Case(
        f"batch {batch_size}, {place.options.accelerator}",
        {
            "ours": partial(place.ours, batch_size, steps, "--config", "configs/tutorial.yaml"),
            "bare loop": partial(place.reference, "bare", steps, *batch),
            "bare loop, tuned": partial(place.reference, "bare", steps, *batch, "--tuned"),
        },
        [Ratio("ours", "bare loop"), Ratio("ours", "bare loop, tuned")],
    )


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
