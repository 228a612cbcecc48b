"""Where the step of a ZeRO stage goes: the shares of its parts in a run of train.py, seen by rank 0.

The recipe is that of `benchmarks.deepspeed`. The row of a collective holds the wait for the other rank too.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from benchmarks import harness, options, report
from benchmarks.contenders import Bench, bench, last_json, length_flags
from benchmarks.deepspeed import BATCH_SIZE, SHORT_STEPS, STEPS, recipe, settle_ranks
from benchmarks.others import Others
from benchmarks.processes import RunFailed, run
from benchmarks.spread import Spread
from cifar_zero.core import exits
from cifar_zero.core.errors import RunError


def main() -> int:
    """Measures; returns the exit code."""
    parser = options.parser("profile_stage", __doc__)
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help="ZeRO stage (default: 3)")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="default: 2 where there are as many devices")
    namespace = parser.parse_args()
    given = options.settle(namespace)
    ranks = settle_ranks([namespace.ranks] if namespace.ranks else None, given)[-1]
    steps = given.steps or (SHORT_STEPS if given.short else STEPS)
    harness.heed_sigterm()
    with bench(given) as place:
        place.prepare()
        rounds: list[Mapping[str, float]] = []
        others = Others()
        for number in range(given.repeats):
            print(f"run {number + 1} of {given.repeats}: stage {namespace.stage}, ranks: {ranks}", file=sys.stderr)
            rounds.append(parts(place, namespace.stage, ranks, steps))
    title = f"profile of ZeRO stage {namespace.stage}, {ranks} rank{'s'[: ranks > 1]}, {given.accelerator}"
    report.heading(title, given, others).print(table(rounds))
    return 0


def parts(place: Bench, stage: int, ranks: int, steps: int) -> dict[str, float]:
    """A run: milliseconds that a step spends in each part.

    Raises RunError where the run failed.
    """
    with tempfile.TemporaryDirectory(dir=place.directory) as out:
        flags = [*recipe(stage, ranks), *length_flags(BATCH_SIZE, steps), *place.train_flags(out)]
        try:
            finished = run("-m", "benchmarks.loops.profiled", str(ranks), str(steps), *flags)
            return {part: 1e3 * seconds / steps for part, seconds in last_json(finished.stdout).items()}
        except RunFailed as failure:
            raise RunError(f"the run {failure}") from failure


def table(rounds: Sequence[Mapping[str, float]]) -> Table:
    """The parts, and last the whole step."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("")
    made.add_column("ms a step", justify="right")
    made.add_column("share", justify="right")
    total = Spread.of([sum(one.values()) for one in rounds])
    for part in rounds[0]:
        spread = Spread.of([one[part] for one in rounds])
        if spread.maximum:
            made.add_row(part, str(spread), f"{spread.median / total.median:.1%}")
    made.add_row("the whole step", str(total), "", style="bold")
    return made


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
