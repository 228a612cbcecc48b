"""Measures what only a GPU shows, the most telling first: whether a replay's tolerance allows for its kernels, whether
each strategy computes what plain PyTorch computes, what the audit costs, how fast the speed record's recipe is, whether
the tests of tests/gpu pass, and how large a model may be.

Each measurement is a program, or several that are run until one fails. A call continues where the last one stopped: the
output of a measurement is written as soon as it ends, and measurements that failed are repeated last. A measurement
that does not fit into the rest of `--minutes` is left to the next call. `--accelerator cpu` rehearses the first
measurement of each kind in small. All results of a folder are of one machine.
"""

import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.runs import ROOT, RunFailed, run
from cifar_zero.core import exits
from cifar_zero.core.atomic import write_json
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import git_commit, gpu_count
from stepcheck.accept.cases import STRATEGIES as AUDITED

Row = dict[str, Any]  # of a measurement: programs that succeeded, tries, seconds, output, machine and commit

RANKS = (1, 2, 8)  # numbers of ranks, as far as there are GPUs; a rehearsal has up to 2
LARGEST = ("baseline", "deepspeed_stage_3_offload", "deepspeed_stage_3_superoffload")
DEPTHS = tuple(2**power for power in range(2, 11))  # blocks of a vit_1b, 50 million parameters each


@dataclass(frozen=True)
class Measurement:
    """Programs that are run one after the other until one fails. The measurement failed if the first program did."""

    name: str  # kind: details
    minutes: float  # time limit
    programs: tuple[tuple[str, ...], ...]  # arguments of python

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]


def measurements(arguments: Namespace, out: Path) -> Iterator[Measurement]:
    """Yields the measurements, the most important first. They write their files into the folder `out`."""
    on_gpu = arguments.accelerator == "gpu"
    accelerator = ("--accelerator", arguments.accelerator)
    images = ("--data.source", "synthetic", "--data.cache", str(out / "cache"))

    yield Measurement("kernels", 4, (("-m", "benchmarks.gpu_kernels"),))
    available = gpu_count() if on_gpu else 2
    quick = () if on_gpu else ("--quick",)
    for ranks, strategy in product([number for number in RANKS if number <= available], AUDITED):
        cases = ("--devices", str(ranks), "--strategies", strategy, *quick)
        verdicts = ("--json", str(out / f"agreement-{strategy}-{ranks}.json"))
        name = f"agreement with plain PyTorch: {strategy}, {ranks} ranks"
        yield Measurement(name, 2.5, (("-m", "stepcheck", "accept", *cases, *verdicts),))
    short = () if on_gpu else ("--steps", "3")
    audit = ("-m", "benchmarks.speed", "audit", "--repeats", "1", *accelerator, *short)
    yield Measurement("cost of the audit: vit_tiny", 8, (audit,))
    real = ("--data.source", "folder", "--data.root", str(arguments.images))
    runs = ("--runs", "20", *(real if arguments.images else images))
    if not on_gpu:
        small = ("--model.width", "0.125", "--precision", "32-true", "--max_steps", "8")
        runs = ("--runs", "1", *images, *small, *accelerator)
    for name, flags in (("eager", ()), ("compiled", ("--compile",))):
        yield Measurement(f"speed record: {name}", 7, (("-m", "benchmarks.speedrun", *runs, *flags),))
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        test = ("-m", "pytest", "-q", str(file), "--timeout", "300")
        yield Measurement(f"tests: {file.name}", 8, (test,))
    for strategy in LARGEST:
        recipe = ("train.py", "--model", "vit_1b" if on_gpu else "vit_tiny", "--optimizer", "adamw", *accelerator)
        recipe += ("--batch_size", "16", "--precision", "bf16-mixed", "--activation_checkpointing", *images)
        recipe += ("--strategy", strategy, "--devices", "1", "--bench_steps", "3", "--logger", "none")
        recipe += ("--out", str(out / "runs"))
        depths = DEPTHS if on_gpu else DEPTHS[:1]
        programs = tuple((*recipe, "--model.depth", str(depth)) for depth in depths)
        yield Measurement(f"largest model: {strategy}", 7, programs)


def main() -> int:
    """Makes the measurements that are missing or failed, as far as --minutes allows. Returns the exit code, which is 1
    if the last try of a chosen measurement failed, whether or not others are still missing."""
    parser = exits.Parser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="cpu: a small rehearsal")
    parser.add_argument("--minutes", type=float, default=9, help="stop after this many minutes (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only measurements whose names begin so")
    parser.add_argument("--out", type=Path, help="results (default: comparisons/gpu, or gpu_rehearsal on a CPU)")
    parser.add_argument("--images", type=Path, help="a folder of real images for the speed record's accuracy")
    arguments = harness.parse(parser)
    arguments.images = arguments.images and arguments.images.absolute()
    end = time.monotonic() + 60 * arguments.minutes
    default = "comparisons/gpu" if arguments.accelerator == "gpu" else "comparisons/gpu_rehearsal"
    out = (arguments.out or Path(default)).absolute()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.json"
    results: dict[str, Row] = json.loads(file.read_text()) if file.exists() else {}
    machine = harness.machine(arguments.accelerator)
    if others := {row.get("machine", "unknown") for row in results.values()} - {machine}:
        raise UsageError(f"--out {out} has results of another machine ({others.pop()}): name another folder")
    heading = harness.heading("gpu", 1, arguments.accelerator)
    chosen = [each for each in measurements(arguments, out) if each.name.startswith(tuple(arguments.parts or [""]))]
    if arguments.accelerator == "cpu":
        first: dict[str, Measurement] = {}
        for each in chosen:
            first.setdefault(each.kind, each)
        chosen = [*first.values()]
    for measurement in in_order(chosen, results):
        left = (end - time.monotonic()) / 60
        if left < min(measurement.minutes, arguments.minutes / 2):
            continue  # a shorter measurement may fit
        print(f"{measurement.name} ({left:.1f} minutes left)", file=sys.stderr, flush=True)
        row = measure(measurement, min(measurement.minutes, left))
        row |= {"machine": machine, "commit": git_commit(ROOT) or "unknown"}
        row["tries"] = 1 + results.get(measurement.name, {}).get("tries", 0)
        results[measurement.name] = row
        write_json(file, results)
        (out / "results.md").write_text(as_markdown(heading, results))
    rows = [results.get(each.name) for each in chosen]
    print(as_markdown(heading, results), f"{rows.count(None)} missing")
    return int(any(row and not row["succeeded"] for row in rows))


def in_order(chosen: Sequence[Measurement], results: Mapping[str, Row]) -> list[Measurement]:
    """Returns what is to be measured: what is missing, then what failed, the least often tried first."""
    rows = {each: results.get(each.name, {"succeeded": 0, "tries": 0}) for each in chosen}
    return sorted((each for each in chosen if not rows[each]["succeeded"]), key=lambda each: rows[each]["tries"])


def measure(measurement: Measurement, minutes: float) -> Row:
    """Runs the programs of a measurement until one fails or the time is over. Returns what its row has about them."""
    started, succeeded, output = time.monotonic(), 0, ""
    for program in measurement.programs:
        left = 60 * minutes - (time.monotonic() - started)
        output += f"$ python {shlex.join(program)}\n"
        try:
            output += run(*program, seconds=max(1.0, left))
        except RunFailed as failure:
            output += f"FAILED: {failure}\n"
            break
        succeeded += 1
    return {"succeeded": succeeded, "seconds": round(time.monotonic() - started, 1), "output": output}


def as_markdown(heading: str, results: Mapping[str, Row]) -> str:
    text = f"{heading}\n"
    for name, row in results.items():
        outcome = f"programs that succeeded: {row['succeeded']}" if row["succeeded"] else "FAILED"
        outcome += f"; {row['seconds']} s; commit {row['commit']}"
        text += f"\n## {name}\n\n{outcome}\n\n```\n{row['output']}```\n"
    return text


if __name__ == "__main__":
    exits.run(main)
