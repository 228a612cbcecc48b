"""Measures what only a GPU shows, the most telling first: which kernels it chooses, whether each strategy computes what
plain PyTorch computes, what the audit costs, how fast the recipes are, and how much memory they take.

With 2 or 8 GPUs it also measures whether the ranks agree and share the memory, whether all ranks end after one is
killed, and whether a run resumes on one rank. A call goes on where the last one stopped: each result is written as soon
as it is measured, a cell that takes longer than its limit fails, and cells that failed are measured again last. A cell
that does not fit into the rest of `--minutes` is left to the next call.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks import gpu_kernels, harness, speed
from benchmarks.runs import ROOT, Bench, RunFailed, bench, last_json, run
from cifar_zero.checkpoints.read import read
from cifar_zero.checkpoints.run_folder import METRICS, newest_checkpoint
from cifar_zero.comparison.result import PASSING
from cifar_zero.core import exits
from cifar_zero.core.atomic import write_json
from cifar_zero.core.hardware import gpu_count
from stepcheck.accept.cases import STRATEGIES as AUDITED

Row = dict[str, Any]  # what a cell measured, by column; "failed" is the reason for a failure

SMALL = ["--data.source", "synthetic", "--devices", "1", "--logger", "none", "--test_figures", "false"]
STEPS = ["--max_steps", "20", "--optimizer", "adam", "--batch_size", "64", "--precision", "32-true"]
CHECKED = ["--check_steps", "20"]  # all steps of STEPS

RANKS = (2, 8)
"""Numbers of ranks that are measured in addition to one, if there are enough GPUs. A rehearsal on the CPU uses the
first number."""

NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}  # TF32 rounding errors are a thousand times larger than float32's

LOSS_DIFFERENCE = 1e-3
"""Largest difference allowed between the losses of a resumed and an uninterrupted run, both in float32."""

STATES_SHARE, PEAK_SHARE = 0.05, 0.15  # largest relative errors of planned states and peak

PLANNED = ("baseline", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload")
SEVERAL = ("ddp", "deepspeed_stage_3", "fsdp2")  # strategies on several ranks
LARGEST = ("baseline", "deepspeed_stage_3_offload", "deepspeed_stage_3_superoffload")
COSTS = {
    "eager": [],
    "ZeRO 2": ["--strategy", "deepspeed_stage_2"],
    "compiled": ["--compile"],
    "ZeRO 2, compiled": ["--strategy", "deepspeed_stage_2", "--compile"],
}
"""Flags of the runs whose audit is timed."""

TESTS = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
DEPTHS = tuple(2**power for power in range(2, 11))  # blocks of a vit_1b, 50 million parameters each


@dataclass
class Place:
    """The device, the folders and the time limit of the measurements."""

    bench: Bench
    out: Path  # folder of results, comparisons and run folders
    images: Path | None  # a folder of real images
    ranks: int  # largest number of ranks of a run; each has one GPU, or is on the CPU in a rehearsal
    over: float = 0.0  # value of time.monotonic() at which the current cell must end

    @property
    def on_gpu(self) -> bool:
        """Whether the measurement is on a GPU. On the CPU it is a rehearsal with fewer steps and smaller models."""
        return self.bench.accelerator == "gpu"

    @property
    def several(self) -> list[int]:
        """The numbers of ranks to measure in addition to one."""
        return [ranks for ranks in RANKS if ranks <= self.ranks]

    @property
    def left(self) -> float:
        """Seconds that the current cell has left."""
        return max(1.0, self.over - time.monotonic())

    def run(self, *arguments: str, **options: Any) -> str:
        """Runs `python <arguments>` with `runs.run`, in the time that is left for the cell."""
        return run(*arguments, seconds=self.left, **options)

    def flags(self, name: str) -> list[str]:
        """Returns the flags of a short run with this name."""
        cache, out = str(self.bench.cache), str(self.out / "runs")
        return [*SMALL, "--data.cache", cache, "--out", out, "--name", name]

    def train(self, name: str, *flags: str, extra_env: dict[str, str] | None = None) -> Row:
        """Runs train.py and returns its metrics.json."""
        self.run("train.py", *self.flags(name), *flags, extra_env=extra_env)
        return json.loads((self.newest(name) / METRICS).read_text())

    def newest(self, name: str) -> Path:
        """Returns the newest run folder of the runs with this name."""
        folders = (self.out / "runs" / name).glob("version_*")
        return max(folders, key=lambda version: int(version.name.removeprefix("version_")))


@dataclass(frozen=True)
class Cell:
    """One measurement. Its result is stored under `part` and `name`."""

    part: str
    name: str
    seconds: float  # time limit
    measure: Callable[[Place], Row]  # raises RunFailed


def cells(place: Place) -> Iterator[Cell]:
    """Yields the measurements, the most important first."""
    for part in gpu_kernels.PARTS:
        yield Cell(f"kernels, {part}", "measured", 60, partial(kernels, part))
    for ranks, strategy in product([1, *place.several], AUDITED if place.on_gpu else AUDITED[:3]):
        name = strategy if ranks == 1 else f"{strategy}, {ranks} ranks"
        yield Cell("agreement with plain PyTorch", name, 150, partial(acceptance, strategy, ranks))
    for name, flags in COSTS.items():
        if place.on_gpu or "--compile" not in flags:
            yield Cell("cost of the audit, vit_tiny", name, 150, partial(audit_cost, flags))
    for name, more in {"eager": [], "compiled": ["--compile"]}.items():
        yield Cell("speed record", name, 400, partial(record, more))
    for model in ("vit_tiny", "vit_large") if place.on_gpu else ("vit_tiny",):
        for strategy in PLANNED:
            yield Cell("memory, bytes", f"{model}, {strategy}", 120, partial(memory, model, strategy, 1))
        for ranks, strategy in product(place.several, SEVERAL):
            name = f"{model}, {strategy}, {ranks} ranks"
            yield Cell("memory, bytes", name, 180, partial(memory, model, strategy, ranks))
    device, three, two = place.bench.accelerator, "deepspeed_stage_3", "deepspeed_stage_2"
    for ranks in place.several:
        yield Cell("a killed rank", f"of {ranks}", 240, partial(killed, ranks))
        relay = [(device, three, ranks), (device, "baseline", 1)]
        yield Cell("resume", f"{ranks} ranks, 1 rank", 150, partial(resumed, relay))
    relay = [("cpu", two, 1), (device, three, 1), ("cpu", "baseline", 1)]
    yield Cell("resume", "CPU, GPU, CPU", 150, partial(resumed, relay))
    for strategy in ("baseline", two, three):
        yield Cell("agreement with the CPU", strategy, 150, partial(across_devices, strategy))
    for batch_size, steps in speed.STEPS.items():
        contenders = {**speed.limit_at(place.bench, batch_size, steps if place.on_gpu else 20).contenders}
        if place.on_gpu:
            compiled = ["--batch_size", str(batch_size), "--compile"]
            contenders["ours, compiled"] = partial(place.bench.ours, steps, *compiled)
        for name, contender in contenders.items():
            yield Cell("images per second", f"batch {batch_size}, {name}", 120, partial(rates, contender))
    for ranks, strategy in product([1, *place.several] if place.several else [], SEVERAL):
        flags = ["--model", "vit_large" if place.on_gpu else "net", "--strategy", strategy, "--devices", str(ranks)]
        flags += ["--batch_size", str(128 * ranks), "--precision", "bf16-mixed"]
        contender = partial(place.bench.ours, 50 if place.on_gpu else 5, *flags)
        yield Cell("images per second, 128 a rank", f"{strategy}, {ranks}", 180, partial(rates, contender))
    for stage in range(4):
        case = speed.at_stage(place.bench, stage, 1, 300 if place.on_gpu else 20)
        for name, contender in case.contenders.items():
            yield Cell("DeepSpeedExamples' recipe", f"ZeRO {stage}, {name}", 240, partial(rates, contender))
    for file in TESTS:
        yield Cell("tests", file.name, 500, partial(tests, file))
    for strategy in LARGEST:
        yield Cell("largest model", strategy, 400, partial(largest, strategy))


def main() -> int:
    """Measures what is missing and returns the exit code, which is 1 if a cell failed."""
    parser = exits.Parser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="cpu: a small rehearsal")
    parser.add_argument("--minutes", type=float, default=9, help="stop after this many minutes (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="measure only tables whose names begin so")
    parser.add_argument("--out", type=Path, default=Path("comparisons/gpu"), help="results (default: %(default)s)")
    parser.add_argument("--images", type=Path, help="a folder of real images for the speed record's accuracy")
    given = harness.parse(parser)
    over = time.monotonic() + 60 * given.minutes
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    results = read_results(out)
    title = harness.heading("gpu", 1, given.accelerator)
    ranks = gpu_count() if given.accelerator == "gpu" else RANKS[0]
    with bench(given.accelerator) as made:
        place = Place(made, out, given.images and given.images.absolute(), ranks)
        chosen = [cell for cell in cells(place) if not given.parts or cell.part.startswith(tuple(given.parts))]
        for cell in in_order(chosen, results):
            left = over - time.monotonic()
            if left < min(cell.seconds, 60 * given.minutes / 2):
                continue  # a shorter cell may fit
            print(f"{cell.part}: {cell.name} ({left / 60:.1f} minutes left)", file=sys.stderr, flush=True)
            measure(cell, place, results, min(cell.seconds, left))
            write_json(out / "results.json", results)
            (out / "results.md").write_text(f"{title}\n{tables(results)}")
    rows = [(cell, results.get(cell.part, {}).get(cell.name)) for cell in chosen]
    failed = [f"failed   {cell.part}: {cell.name}" for cell, row in rows if row and "failed" in row]
    missing = sum(row is None for _, row in rows)
    print(tables(results), *failed, f"{missing} missing", sep="\n")
    return int(bool(failed))


def read_results(out: Path) -> dict[str, dict[str, Row]]:
    """Returns the results of earlier calls."""
    file = out / "results.json"
    return json.loads(file.read_text()) if file.exists() else {}


def in_order(chosen: Sequence[Cell], results: dict[str, dict[str, Row]]) -> list[Cell]:
    """Returns the cells to measure: those that are missing, then those that failed, the least often tried first."""
    rows = [(cell, results.get(cell.part, {}).get(cell.name)) for cell in chosen]
    missing = [cell for cell, row in rows if row is None]
    failed = [(row["tries"], cell) for cell, row in rows if row and "failed" in row]
    return missing + [cell for _, cell in sorted(failed, key=lambda each: each[0])]


def measure(cell: Cell, place: Place, results: dict[str, dict[str, Row]], seconds: float) -> None:
    """Measures a cell and adds its row to the results."""
    rows = results.setdefault(cell.part, {})
    tries = rows.get(cell.name, {}).get("tries", 0) + 1
    started = time.monotonic()
    place.over = started + seconds
    try:
        row = cell.measure(place)
    except RunFailed as failure:
        row = {"failed": str(failure)}
    rows[cell.name] = {**row, "seconds": round(time.monotonic() - started, 1)}
    if "failed" in row:
        rows[cell.name]["tries"] = tries


def tables(results: dict[str, dict[str, Row]]) -> str:
    """Returns a Markdown table for each part."""
    return "\n".join(harness.markdown(part, rows) for part, rows in results.items())


def kernels(part: str, place: Place) -> Row:
    """Returns what a part of `gpu_kernels` measures."""
    flags = [] if place.on_gpu else ["--cpu"]
    return last_json(place.run("-m", "benchmarks.gpu_kernels", part, *flags))


def acceptance(strategy: str, ranks: int, place: Place) -> Row:
    """Returns the number of cases of stepcheck accept, the number that passes, how many replayed steps were
    bit-identical, and the summaries of the cases that fail."""
    quick = [] if place.on_gpu else ["--quick"]
    file = place.out / f"acceptance-{strategy}-{ranks}.json"
    file.unlink(missing_ok=True)
    flags = ["--devices", str(ranks), "--strategies", strategy, *quick, "--json", str(file)]
    place.run("-m", "stepcheck", "accept", *flags, exit_code=None)
    if not file.exists():
        raise RunFailed("stepcheck accept wrote no verdicts")
    cases = json.loads(file.read_text())["engines"]
    bad = [f"{each['engine']}: {each['summary']}" for each in cases if not each["passed"]]
    shares = [share for each in cases for share in each["shares"].values() if not each["known"]]
    row = {"cases": len(cases), "pass": len(cases) - len(bad), "largest share": max(map(float, shares), default=0.0)}
    row |= {f"{key} steps": sum(each.get(key, 0) for each in cases) for key in ("replayed", "identical")}
    return with_failures(row, bad)


def audit_cost(flags: Sequence[str], place: Place) -> Row:
    """Returns the images per second of vit_tiny with and without the audit of each step."""
    given = ["--model", "vit_tiny", "--batch_size", "512" if place.on_gpu else "8", "--precision", "bf16-mixed", *flags]
    steps = 200 if place.on_gpu else 3
    plain, audited = (place.bench.ours(steps, *given, *more)["images_per_second"] for more in ([], ["--audit"]))
    return {"images/s": round(plain, 1), "audited": round(audited, 1), "overhead": f"{plain / audited - 1:.1%}"}


def across_devices(strategy: str, place: Place) -> Row:
    """Returns the verdicts of runs on the GPU, with and without TF32, whose steps are all replayed, and how far each
    run drifts from the same run on the CPU."""
    place.train(f"across-{strategy}-cpu", *STEPS, *CHECKED, "--accelerator", "cpu")
    row, bad = dict[str, Any](), list[str]()
    for tf32, environment in (("TF32", {}), ("no TF32", NO_TF32)):
        flags = ["--strategy", strategy, "--accelerator", place.bench.accelerator]
        place.train(f"across-{strategy}-{tf32}", *STEPS, *CHECKED, *flags, extra_env=environment)
        runs = [str(place.newest(f"across-{strategy}-{which}")) for which in ("cpu", tf32)]
        on_cpu, other = compared(place, "across", "--runs", *runs)
        row[tf32] = ": ".join(filter(None, [other["outcome"], other["drift"]]))
        bad += [f"{tf32}: {each['remark']}" for each in (on_cpu, other) if not good(each)]
    return with_failures(row, bad)


def resumed(relay: Sequence[tuple[str, str, int]], place: Place) -> Row:
    """Returns the losses of a run that is continued for ten steps at each place of `relay`, and the loss of an
    uninterrupted run at the last place. A place is an accelerator, a strategy and a number of ranks. The row fails if
    the last two losses differ by LOSS_DIFFERENCE or more."""
    row, name = dict[str, Any](), f"resumed-{len(relay)}-{relay[0][2]}"

    def loss(number: int, name: str, *more: str) -> float:
        accelerator, strategy, ranks = relay[number - 1]
        flags = ["--accelerator", accelerator, "--strategy", strategy, "--devices", str(ranks)]
        flags += [*STEPS[2:], "--log_interval", "1", "--max_steps", str(10 * number), *more]
        return place.train(name, *flags, extra_env=NO_TF32)["train/loss"]

    resume = list[str]()
    last = 0.0
    for number, (accelerator, strategy, ranks) in enumerate(relay, 1):
        last = row[f"loss on the {accelerator}, {strategy}, {ranks}"] = loss(number, name, *resume)
        resume = ["--resume", str(place.newest(name))]
    row["uninterrupted"] = loss(len(relay), f"{name}-whole")
    off = abs(row["uninterrupted"] - last)
    return row if off < LOSS_DIFFERENCE else {**row, "failed": f"the loss is {off:.1e} off"}


class KillLastRank(Callback):
    """Kills the last rank, as the kernel does when memory is full."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *given: Any) -> None:
        """Kills this process after twelve steps if it is the last rank."""
        if trainer.global_step == 12 and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(ranks: int, place: Place) -> Row:
    """Kills the last rank of a run, checks the error message of the run, and resumes the run from its newest
    checkpoint. Returns the saved step and the step that the resumed run reaches."""
    name = f"killed-{ranks}"
    flags = ["--accelerator", place.bench.accelerator, "--devices", str(ranks), "--strategy", "deepspeed_stage_3"]
    flags += ["--batch_size", str(32 * ranks), "--save_every_n_steps", "5"]
    callback = f"benchmarks.gpu.{KillLastRank.__name__}"
    try:
        place.train(name, *flags, "--max_steps", "20", "--trainer.callbacks", callback)
        return {"failed": "the rank was not killed"}
    except RunFailed as failure:
        end = str(failure)
    if "exit code 1," not in end or f"error: rank {ranks - 1} ended with signal SIGKILL" not in end:
        return {"failed": end}
    run_folder = place.newest(name)
    step = read(newest_checkpoint(run_folder))["global_step"]
    metrics = place.train(name, *flags, "--max_steps", str(step + 1), "--resume", str(run_folder))
    return {"saved step": step, "resumed to step": metrics["steps"]}


def tests(file: Path, place: Place) -> Row:
    """Returns the last line of pytest on a file of tests/gpu, and the tests that do not pass."""
    answer = place.run("-m", "pytest", "-q", str(file), "--timeout", "100", exit_code=None)
    lines = [line for line in answer.splitlines() if line.strip()]
    bad = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return with_failures({"pytest": lines[-1] if lines else ""}, bad)


def memory(model: str, strategy: str, ranks: int, place: Place) -> Row:
    """Returns the planned and the measured bytes of a rank's model states and of its peak memory."""
    recipe = ["--model", model, "--optimizer", "adamw", "--precision", "bf16-mixed", "--batch_size", str(16 * ranks)]
    recipe += ["--accelerator", place.bench.accelerator, "--devices", str(ranks)]
    command = ["-m", "cifar_zero", "plan", *recipe, "--device_memory", "130GB", "--json"]
    plan = json.loads(place.run(*command, exit_code=None))
    (planned,) = [row for row in plan["strategies"] if row["strategy"] == strategy]
    few_images = ["--data.synthetic_size", "640"]  # images take memory on the GPU too
    name = f"memory-{model}-{strategy}-{ranks}"
    metrics = place.train(name, *recipe, "--strategy", strategy, *few_images, "--bench_steps", "6")
    states, peak = metrics["mem/model_state_rank_bytes"][0], metrics["mem/peak_rank_bytes"][0]
    expected = sum(sum(planned["states"][where].values()) for where in ("device", "host"))
    row = {"states planned": expected, "states": states, "peak planned": planned["device"], "peak": peak}
    off = [abs(row[f"{name} planned"] / row[name] - 1) for name in ("states", "peak")]
    row |= {"off": " and ".join(f"{share:.0%}" for share in off)}
    if off[0] > STATES_SHARE or (place.on_gpu and off[1] > PEAK_SHARE):
        row["failed"] = f"planned states or peak off by {row['off']}"
    return row


def rates(contender: Callable[[], Any], place: Place) -> Row:
    """Returns the figures of one contender by the headings of the table."""
    figures = contender()
    return {heading: round(figures[name], 2) for name, heading in harness.UNITS.items() if name in figures}


def record(more: Sequence[str], place: Place) -> Row:
    """Returns the accuracy and time of the speed record's recipe, over 20 runs on a GPU or one short run in a
    rehearsal."""
    data = ["--data.source", "folder", "--data.root", str(place.images)] if place.images else SMALL[:2]
    runs = ["--runs", "20"]
    if not place.on_gpu:
        runs = ["--runs", "1", "--model.width", "0.125", "--precision", "32-true", "--accelerator", "cpu"]
        runs += ["--max_steps", "8"]
    answer = place.run("-m", "benchmarks.speedrun", *runs, *data, *more)
    found = dict(re.findall(r"^(accuracy|time) (.*)$", answer, re.MULTILINE))
    return {"images": "real" if place.images else "synthetic", "runs": runs[1], **found}


def largest(strategy: str, place: Place) -> Row:
    """Returns the figures of the deepest vision transformer that trains for three steps. Deeper models are tried until
    one fails."""
    row = dict[str, Any]()
    recipe = ["--model", "vit_1b" if place.on_gpu else "vit_tiny", "--optimizer", "adamw", "--precision", "bf16-mixed"]
    recipe += ["--activation_checkpointing", "--batch_size", "16", "--strategy", strategy, "--bench_steps", "3"]
    for depth in DEPTHS if place.on_gpu else DEPTHS[:1]:
        try:
            metrics = place.train(f"largest-{strategy}", *recipe, "--model.depth", str(depth))
        except RunFailed as failure:
            row["ends at"] = f"{depth} blocks: {str(failure).splitlines()[-1]}"
            break
        row |= {"parameters": metrics["parameters"], "TFLOPS": metrics["perf/tflops"]}
        row |= {"peak bytes": metrics["mem/peak_rank_bytes"][0], "images/s": metrics["perf/images_per_second"]}
    return row if "parameters" in row else {**row, "failed": row["ends at"]}


def compared(place: Place, name: str, *flags: str) -> list[Row]:
    """Runs `cifar-zero compare` and returns the variants of comparison.json. When the time is up, the comparison is
    interrupted as by Ctrl-C, and then reports the trainings that are finished."""
    command = [sys.executable, "-m", "cifar_zero", "compare", *flags, "--out", str(place.out), "--name", name]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        process.wait(place.left)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    reports = sorted((place.out / name).glob("*/comparison.json"), key=lambda file: file.stat().st_mtime)
    if not reports:
        raise RunFailed(f"cifar-zero compare ended with exit code {process.returncode} and wrote no report")
    return json.loads(reports[-1].read_text())["variants"]


def good(variant: Row) -> bool:
    """Returns whether a variant has passed."""
    return variant["outcome"] in PASSING


def with_failures(row: Row, bad: Sequence[str]) -> Row:
    """Returns the row. If `bad` has messages, the row is marked as failed with these messages."""
    return {**row, "failed": "; ".join(bad)} if bad else row


if __name__ == "__main__":
    exits.run(main)
