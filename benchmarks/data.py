"""The loaders alone, without training: ours (--data.loader memory and torch) against torchvision's datasets with
torch's DataLoader and 2 workers.

The images are synthetic ones in memory, for torchvision in its CIFAR10 class; with --root also those of a folder, which
ours decodes once into a cache and torchvision's ImageFolder in each epoch.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.harness import Case
from benchmarks.runs import Bench, bench, last_json, run
from cifar_zero.core import exits


def main() -> int:
    """Measures; returns the exit code."""
    parser = harness.parser("data", __doc__)
    parser.add_argument("--root", help="measure a folder of images too, with train/ and test/ as --data.source folder")
    given = harness.parse(parser)
    with bench(given.accelerator) as place:
        cases = [case(place, "50,000 synthetic images", "torchvision CIFAR10")]
        if given.root:
            seconds = epoch(place, "memory", "--root", given.root)["seconds_to_first_batch"]
            print(f"ours decoded {given.root} in {seconds:.1f} s, once")
            cases.append(case(place, given.root, "torchvision ImageFolder", "--root", given.root))
        return harness.compare("data", cases, given)


def case(place: Bench, images: str, theirs: str, *flags: str) -> Case:
    """Returns the comparison on some images."""
    runs = {f"ours, {loader}": partial(epoch, place, loader, *flags) for loader in ("memory", "torch")}
    ratios = [(ours, theirs) for ours in runs]
    runs[theirs] = partial(epoch, place, "torchvision", *flags)
    return Case(f"{images}, batches of 64, without training", runs, ratios)


def epoch(place: Bench, loader: str, *flags: str) -> Any:
    """Runs benchmarks.loops.loaders and returns the figures of its epoch."""
    program = ("-m", "benchmarks.loops.loaders", loader, "--cache", str(place.cache))
    return last_json(run(*program, *flags, extra_env={"OMP_NUM_THREADS": "1"}))  # as torch sets it in its workers


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
