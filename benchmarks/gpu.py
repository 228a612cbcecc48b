"""Measures what only a GPU shows, the most telling first: which kernels it chooses, whether each strategy computes what
plain PyTorch computes, what the audit costs, how fast the speed record's recipe is, and how much memory a run takes.

With 2 or 8 GPUs it also measures whether all ranks end after one is killed, and whether a run resumes on one rank. A
call continues where the last stopped: each result is written as soon as it is measured, a cell that takes longer than
its limit fails, and cells that failed are measured again last. A cell that does not fit into the rest of `--minutes` is
left to the next call. `--accelerator cpu` rehearses the first cell of each table in small.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks import gpu_kernels, harness
from benchmarks.runs import ROOT, Bench, RunFailed, bench, last_json, run
from cifar_zero.checkpoints.read import read
from cifar_zero.checkpoints.run_folder import METRICS, newest_checkpoint, newest_run
from cifar_zero.core import exits
from cifar_zero.core.atomic import write_json
from cifar_zero.core.hardware import gpu_count
from stepcheck.accept.cases import STRATEGIES as AUDITED

Row = dict[str, Any]  # what a cell measured, by column; "failed" is the reason for a failure
Results = dict[str, dict[str, Row]]  # rows by table and name

RANKS = (1, 2, 8)  # numbers of ranks, as far as there are GPUs; a rehearsal has up to 2

LOSS_ERROR = 1e-3  # largest difference between the losses of a resumed and an uninterrupted run, both in float32
STATES_ERROR, PEAK_ERROR = 0.05, 0.15  # largest relative errors of planned states and peak

PLANNED = ("baseline", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload")
LARGEST = ("baseline", "deepspeed_stage_3_offload", "deepspeed_stage_3_superoffload")
DEPTHS = tuple(2**power for power in range(2, 11))  # blocks of a vit_1b, 50 million parameters each
COSTS = {
    "eager": [],
    "ZeRO 2": ["--strategy", "deepspeed_stage_2"],
    "compiled": ["--compile"],
    "ZeRO 2, compiled": ["--strategy", "deepspeed_stage_2", "--compile"],
}
"""Flags of the runs whose audit is timed."""


@dataclass
class Session:
    """The device, the folders and the time limit of the measurements."""

    bench: Bench
    out: Path  # folder of results, verdicts and run folders
    images: Path | None  # a folder of real images
    deadline: float = 0.0  # value of time.monotonic() at which the current cell must end

    @property
    def on_gpu(self) -> bool:
        """Whether the measurement is on a GPU. On the CPU it is a rehearsal with fewer steps and smaller models."""
        return self.bench.accelerator == "gpu"

    def run(self, *arguments: str, **options: Any) -> str:
        """Runs `python <arguments>` with `runs.run`, in the time that is left for the cell."""
        return run(*arguments, seconds=max(1.0, self.deadline - time.monotonic()), **options)

    def train(self, name: str, *flags: str, extra_env: dict[str, str] | None = None) -> Row:
        """Runs train.py and returns its metrics.json."""
        data = ["--data.source", "synthetic", "--data.cache", str(self.bench.cache)]
        output = ["--logger", "none", "--test_figures", "false", "--out", str(self.out / "runs"), "--name", name]
        self.run("train.py", "--devices", "1", *data, *output, *flags, extra_env=extra_env)
        return json.loads((self.newest(name) / METRICS).read_text())

    def newest(self, name: str) -> Path:
        """Returns the newest run folder of the runs with this name."""
        return newest_run(self.out / "runs" / name)


@dataclass(frozen=True)
class Cell:
    """One measurement. Its result is stored under `table` and `name`."""

    table: str
    name: str
    seconds: float  # time limit
    measure: Callable[[Session], Row]


def cells(session: Session) -> Iterator[Cell]:
    """Yields the measurements, the most important first."""
    available = gpu_count() if session.on_gpu else 2
    numbers = [number for number in RANKS if number <= available]
    for part in gpu_kernels.PARTS:
        yield Cell(f"kernels, {part}", "measured", 60, partial(kernels, part))
    for number, strategy in product(numbers, AUDITED):
        name = f"{strategy}, {number} ranks"
        yield Cell("agreement with plain PyTorch", name, 150, partial(acceptance, strategy, number))
    for name, flags in COSTS.items():
        yield Cell("cost of the audit, vit_tiny", name, 150, partial(audit_cost, flags))
    for name, flags in (("eager", []), ("compiled", ["--compile"])):
        yield Cell("speed record", name, 400, partial(record, flags))
    for number, strategy in product(numbers, PLANNED):
        yield Cell("memory, bytes", f"{strategy}, {number} ranks", 180, partial(memory, strategy, number))
    device = session.bench.accelerator
    for number in numbers[1:]:
        yield Cell("a killed rank", f"of {number}", 240, partial(killed, number))
        relay = [(device, "deepspeed_stage_3", number), (device, "baseline", 1)]
        yield Cell("resume", f"{number} ranks, 1 rank", 150, partial(resumed, relay))
    relay = [("cpu", "deepspeed_stage_2", 1), (device, "deepspeed_stage_3", 1), ("cpu", "baseline", 1)]
    yield Cell("resume", "CPU, GPU, CPU", 150, partial(resumed, relay))
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
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
    arguments = harness.parse(parser)
    end = time.monotonic() + 60 * arguments.minutes
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.json"
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    title = harness.heading("gpu", 1, arguments.accelerator)
    with bench(arguments.accelerator) as made:
        session = Session(made, out, arguments.images and arguments.images.absolute())
        chosen = [cell for cell in cells(session) if cell.table.startswith(tuple(arguments.parts or [""]))]
        if not session.on_gpu:
            tables = [cell.table for cell in chosen]
            chosen = [cell for number, cell in enumerate(chosen) if cell.table not in tables[:number]]
        for cell in in_order(chosen, results):
            left = end - time.monotonic()
            if left < min(cell.seconds, 60 * arguments.minutes / 2):
                continue  # a shorter cell may fit
            print(f"{cell.table}: {cell.name} ({left / 60:.1f} minutes left)", file=sys.stderr, flush=True)
            measure(cell, session, results, min(cell.seconds, left))
            write_json(file, results)
            (out / "results.md").write_text(f"{title}\n{as_markdown(results)}")
    states = [(cell, results.get(cell.table, {}).get(cell.name)) for cell in chosen]
    failed = [f"failed   {cell.table}: {cell.name}" for cell, row in states if row and "failed" in row]
    missing = sum(row is None for _, row in states)
    print(as_markdown(results), *failed, f"{missing} missing", sep="\n")
    return int(bool(failed))


def in_order(chosen: Sequence[Cell], results: Results) -> list[Cell]:
    """Returns the cells to measure: those that are missing, then those that failed, the least often tried first."""
    tries: dict[Cell, int] = {}
    for cell in chosen:
        row = results.get(cell.table, {}).get(cell.name, {"failed": "missing", "tries": 0})
        if "failed" in row:
            tries[cell] = row["tries"]
    return sorted(tries, key=tries.__getitem__)


def measure(cell: Cell, session: Session, results: Results, seconds: float) -> None:
    """Measures a cell and adds its row to the results."""
    rows = results.setdefault(cell.table, {})
    started = time.monotonic()
    session.deadline = started + seconds
    try:
        row = cell.measure(session)
    except Exception as failure:  # of any kind, because the other cells are still to be measured
        row = {"failed": f"{type(failure).__name__}: {failure}"}
    if "failed" in row:
        row["tries"] = rows.get(cell.name, {}).get("tries", 0) + 1
    rows[cell.name] = {**row, "seconds": round(time.monotonic() - started, 1)}


def as_markdown(results: Results) -> str:
    return "\n".join(harness.markdown(table, rows) for table, rows in results.items())


def kernels(part: str, session: Session) -> Row:
    """Returns what a part of `gpu_kernels` measures."""
    flags = [] if session.on_gpu else ["--cpu"]
    return last_json(session.run("-m", "benchmarks.gpu_kernels", part, *flags))


def acceptance(strategy: str, ranks: int, session: Session) -> Row:
    """Returns the number of cases of stepcheck accept, the number that passes, how many replayed steps were
    bit-identical, and the summaries of the cases that fail."""
    quick = [] if session.on_gpu else ["--quick"]
    file = session.out / f"acceptance-{strategy}-{ranks}.json"
    file.unlink(missing_ok=True)
    flags = ["--devices", str(ranks), "--strategies", strategy, *quick, "--json", str(file)]
    session.run("-m", "stepcheck", "accept", *flags, exit_code=None)
    if not file.exists():
        raise RunFailed("stepcheck accept wrote no verdicts")
    cases = json.loads(file.read_text())["engines"]
    failures = [f"{each['engine']}: {each['summary']}" for each in cases if not each["passed"]]
    shares = [share for each in cases if not each["known"] for share in each["shares"].values() if share != "infinite"]
    row = {"cases": len(cases), "pass": len(cases) - len(failures), "largest share": max(shares, default=0.0)}
    row |= {f"{key} steps": sum(each.get(key, 0) for each in cases) for key in ("replayed", "identical")}
    return with_failures(row, failures)


def audit_cost(flags: Sequence[str], session: Session) -> Row:
    """Returns the images per second of vit_tiny with and without the audit of each step."""
    batch_size, steps = ("512", 200) if session.on_gpu else ("8", 3)
    recipe = ["--model", "vit_tiny", "--batch_size", batch_size, "--precision", "bf16-mixed", *flags]
    plain, audited = (session.bench.train_py(steps, *recipe, *more)["images_per_second"] for more in ([], ["--audit"]))
    return {"images/s": round(plain, 1), "audited": round(audited, 1), "overhead": f"{plain / audited - 1:.1%}"}


def record(flags: Sequence[str], session: Session) -> Row:
    """Returns the accuracy and time of the speed record's recipe, over 20 runs on a GPU or one short run in a
    rehearsal."""
    data = ["--data.source", "folder", "--data.root", str(session.images)]
    if session.images is None:
        data = ["--data.source", "synthetic", "--data.cache", str(session.bench.cache)]
    runs = ["--runs", "20"]
    if not session.on_gpu:
        runs = ["--runs", "1", "--model.width", "0.125", "--precision", "32-true", "--accelerator", "cpu"]
        runs += ["--max_steps", "8"]
    printed = session.run("-m", "benchmarks.speedrun", *runs, *data, *flags)
    figures = dict(re.findall(r"^(accuracy|time) (.*)$", printed, re.MULTILINE))
    return {"images": "real" if session.images else "synthetic", "runs": runs[1], **figures}


def memory(strategy: str, ranks: int, session: Session) -> Row:
    """Returns the planned and the measured bytes of a rank's model states and of its peak memory."""
    recipe = ["--model", "vit_large" if session.on_gpu else "vit_tiny", "--optimizer", "adamw"]
    recipe += ["--precision", "bf16-mixed", "--batch_size", str(16 * ranks)]
    recipe += ["--accelerator", session.bench.accelerator, "--devices", str(ranks)]
    command = ["-m", "cifar_zero", "plan", *recipe, "--device_memory", "130GB", "--json"]
    plan = json.loads(session.run(*command, exit_code=None))
    (planned,) = [row for row in plan["strategies"] if row["strategy"] == strategy]
    few_images = ["--data.synthetic_size", "640"]  # images take memory on the GPU too
    metrics = session.train("memory", *recipe, "--strategy", strategy, *few_images, "--bench_steps", "6")
    states, peak = metrics["mem/model_state_rank_bytes"][0], metrics["mem/peak_rank_bytes"][0]
    planned_states = sum(sum(planned["states"][where].values()) for where in ("device", "host"))
    states_error, peak_error = abs(planned_states / states - 1), abs(planned["device"] / peak - 1)
    row = {"states planned": planned_states, "states": states, "peak planned": planned["device"], "peak": peak}
    row["errors"] = f"{states_error:.0%} and {peak_error:.0%}"
    if states_error > STATES_ERROR or (session.on_gpu and peak_error > PEAK_ERROR):
        row["failed"] = "a planned number is too far off"
    return row


class KillLastRank(Callback):
    """Kills the last rank, as the kernel does when memory is full."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Kills this process after twelve steps if it is the last rank."""
        if trainer.global_step == 12 and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(ranks: int, session: Session) -> Row:
    """Kills the last rank of a run, checks the error message of the run, and resumes the run from its newest
    checkpoint. Returns the saved step and the step that the resumed run reaches."""
    flags = ["--accelerator", session.bench.accelerator, "--devices", str(ranks), "--strategy", "deepspeed_stage_3"]
    flags += ["--batch_size", str(32 * ranks), "--save_every_n_steps", "5"]
    callback = f"benchmarks.gpu.{KillLastRank.__name__}"
    try:
        session.train("killed", *flags, "--max_steps", "20", "--trainer.callbacks", callback)
        return {"failed": "the rank was not killed"}
    except RunFailed as failure:
        message = str(failure)
    if "exit code 1," not in message or f"error: rank {ranks - 1} ended with signal SIGKILL" not in message:
        return {"failed": message}
    run_folder = session.newest("killed")
    step = read(newest_checkpoint(run_folder))["global_step"]
    metrics = session.train("killed", *flags, "--max_steps", str(step + 1), "--resume", str(run_folder))
    return {"saved step": step, "resumed to step": metrics["steps"]}


def resumed(relay: Sequence[tuple[str, str, int]], session: Session) -> Row:
    """Returns the losses of a run that continues for ten steps on each leg of `relay`, and the loss of an uninterrupted
    run on the last leg. A leg is an accelerator, a strategy and a number of ranks. The row fails if the last two losses
    differ by LOSS_ERROR or more."""
    recipe = ["--optimizer", "adam", "--batch_size", "64", "--precision", "32-true", "--log_interval", "1"]

    def loss(number: int, name: str, *more: str) -> float:
        accelerator, strategy, ranks = relay[number - 1]
        leg = ["--accelerator", accelerator, "--strategy", strategy, "--devices", str(ranks)]
        steps = ["--max_steps", str(10 * number)]
        # TF32's rounding errors are a thousand times as large as float32's.
        return session.train(name, *recipe, *leg, *steps, *more, extra_env={"NVIDIA_TF32_OVERRIDE": "0"})["train/loss"]

    row: Row = {}
    resume: list[str] = []
    last = 0.0
    for number, (accelerator, strategy, ranks) in enumerate(relay, 1):
        last = row[f"loss on the {accelerator}, {strategy}, {ranks}"] = loss(number, "resumed", *resume)
        resume = ["--resume", str(session.newest("resumed"))]
    row["uninterrupted"] = loss(len(relay), "uninterrupted")
    error = abs(row["uninterrupted"] - last)
    return row if error < LOSS_ERROR else {**row, "failed": f"the loss is {error:.1e} off"}


def tests(file: Path, session: Session) -> Row:
    """Returns the last line of pytest on a file of tests/gpu, and the tests that do not pass."""
    printed = session.run("-m", "pytest", "-q", str(file), "--timeout", "100", exit_code=None)
    lines = [line for line in printed.splitlines() if line.strip()]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return with_failures({"pytest": lines[-1] if lines else ""}, failures)


def largest(strategy: str, session: Session) -> Row:
    """Returns the figures of the deepest vision transformer that trains for three steps. Deeper models are tried until
    one fails."""
    row: Row = {}
    recipe = ["--model", "vit_1b" if session.on_gpu else "vit_tiny", "--optimizer", "adamw", "--batch_size", "16"]
    recipe += ["--precision", "bf16-mixed", "--activation_checkpointing", "--strategy", strategy, "--bench_steps", "3"]
    for depth in DEPTHS if session.on_gpu else DEPTHS[:1]:
        try:
            metrics = session.train("largest", *recipe, "--model.depth", str(depth))
        except RunFailed as failure:
            row["ends at"] = f"{depth} blocks: {str(failure).splitlines()[-1]}"
            break
        row |= {"parameters": metrics["parameters"], "TFLOPS": metrics["perf/tflops"]}
        row |= {"peak bytes": metrics["mem/peak_rank_bytes"][0], "images/s": metrics["perf/images_per_second"]}
    return row if "parameters" in row else {**row, "failed": row["ends at"]}


def with_failures(row: Row, failures: Sequence[str]) -> Row:
    """Returns the row. If there are failures, the row is marked as failed with their messages."""
    return {**row, "failed": "; ".join(failures)} if failures else row


if __name__ == "__main__":
    exits.run(main)
