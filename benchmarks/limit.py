"""How close train.py comes to the limit of the hardware: a bare loop over images in memory, at three batch sizes.

The bare loop is plain eager PyTorch with torch's defaults. The tuned loop adds what makes it faster: the fused
optimizer, and the threads, convolution kernels and memory format that train.py chooses for the batch.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks import harness
from benchmarks.harness import Case
from benchmarks.runs import Bench, bench
from cifar_zero.core import exits

STEPS = {4: 2000, 64: 500, 512: 100}  # timed steps at each batch size


def main() -> int:
    """Measures; returns the exit code."""
    parser = harness.parser("limit", __doc__)
    defaults = ", ".join(f"{steps} at batch {batch_size}" for batch_size, steps in STEPS.items())
    parser.add_argument("--steps", type=int, help=f"timed steps of a run (default: {defaults})")
    given = harness.parse(parser)
    with bench(given.accelerator) as place:
        cases = [case(place, batch_size, given.steps or STEPS[batch_size]) for batch_size in STEPS]
        return harness.compare("limit", cases, given)


def case(place: Bench, batch_size: int, steps: int) -> Case:
    """Returns the comparison at a batch size."""
    batch = ("--batch_size", str(batch_size))
    contenders = {
        "ours": partial(place.ours, steps, "--config", "configs/tutorial.yaml", *batch),
        "bare loop": partial(place.reference, "bare", steps, *batch),
        "bare loop, tuned": partial(place.reference, "bare", steps, *batch, "--tuned"),
    }
    ratios = [("ours", "bare loop"), ("ours", "bare loop, tuned")]
    return Case(f"batch {batch_size}, {place.accelerator}", contenders, ratios)


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
