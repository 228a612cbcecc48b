"""The first minutes on a GPU: does every strategy train as the baseline does, is the memory as planned, how fast is it,
and what is the largest model? With 2 or 8 GPUs also: do their ranks agree, share the memory, end together and resume on
one? Results are written as they come; a second call continues with what is missing.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from benchmarks import harness, speed
from benchmarks.runs import NOT_INHERITED, ROOT, Bench, RunFailed, bench, run
from cifar_zero.checkpoints.read import read
from cifar_zero.checkpoints.run_folder import checkpoints, newest_checkpoint
from cifar_zero.comparison.result import GOOD
from cifar_zero.core import exits
from cifar_zero.core.hardware import gpu_count
from cifar_zero.reports.summary import write_json

Row = dict[str, Any]  # what a cell measured, by column; "failed" says why it counts as a failure

SMALL = ["--data.source", "synthetic", "--devices", "1", "--logger", "none", "--test_figures", "false"]
STEPS = ["--max_steps", "20", "--optimizer", "adam", "--batch_size", "64", "--precision", "32-true"]

RANKS = (2, 8)
"""Numbers of ranks that are measured on top of one, as far as there are GPUs; a rehearsal has the first."""

NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}  # TF32 rounds a thousand times more than float32

LOSS_DIFFERENCE = 1e-3
"""Largest difference of a resumed run's loss from that of the uninterrupted run, both in float32."""

STATES_SHARE, PEAK_SHARE = 0.05, 0.15  # largest differences of the planned from the measured model states and peak

TESTS = (
    "test_loader_on_gpu.py",
    "test_on_gpu.py::test_compiled_and_as_graphs",
    "test_on_gpu.py::test_a_benchmark_times_the_steps_of_the_device",
    "test_memory_on_gpu.py",
    "test_offload_on_gpu.py",
)
"""The tests of tests/gpu that run; the others compare what the acceptance compares."""

PLANNED = ("baseline", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload")
SEVERAL = ("ddp", "deepspeed_stage_3", "fsdp2")  # strategies on several ranks
LARGEST = ("baseline", "deepspeed_stage_3_offload", "deepspeed_stage_3_superoffload")
DEPTHS = tuple(2**power for power in range(2, 11))  # blocks of a vit_1b, 50 million parameters each


@dataclass(frozen=True)
class Place:
    """Where and how the cells measure."""

    bench: Bench
    out: Path  # of results, comparisons and run folders
    images: Path | None  # a folder of real images
    ranks: int  # the most that a run has, each on a GPU of its own, or in a rehearsal on the CPU

    @property
    def on_gpu(self) -> bool:
        """Whether this is the real thing; on the CPU it is a rehearsal with less of everything."""
        return self.bench.accelerator == "gpu"

    @property
    def several(self) -> list[int]:
        """The numbers of ranks to measure, other than one."""
        return [ranks for ranks in RANKS if ranks <= self.ranks]

    def flags(self, folder: str) -> list[str]:
        """Returns the flags of a short run, whose folder is under `out`."""
        return [*SMALL, "--data.cache", str(self.bench.cache), "--out", str(self.out / "runs" / folder)]


@dataclass(frozen=True)
class Cell:
    """One measurement; its result is kept under `part` and `name`."""

    part: str
    name: str
    seconds: float  # its time limit
    measure: Callable[[Place, float], Row]  # takes the place and the seconds left. Raises RunFailed


def cells(place: Place) -> Iterator[Cell]:
    """Yields the measurements, the most important first."""
    yield Cell("machine", "doctor", 120, doctor)
    yield Cell("agreement with the baseline", "acceptance", 420, partial(acceptance, 1))
    for ranks in place.several:
        yield Cell("agreement with the baseline", f"acceptance, {ranks} ranks", 600, partial(acceptance, ranks))
        yield Cell("a killed rank", f"of {ranks}", 240, partial(killed, ranks))
    yield Cell("agreement with the CPU", "20 steps", 240, across_devices)
    here, three, two = place.bench.accelerator, "deepspeed_stage_3", "deepspeed_stage_2"
    relay = [("cpu", two, 1), (here, three, 1), ("cpu", "baseline", 1)]
    yield Cell("resume", "CPU, GPU, CPU", 150, partial(resumed, relay))
    for ranks in place.several:
        relay = [(here, three, ranks), (here, "baseline", 1)]
        yield Cell("resume", f"{ranks} ranks, 1 rank", 150, partial(resumed, relay))
    for group in TESTS:
        yield Cell("tests", group, 420, partial(tests, group))
    for model in ("vit_tiny", "vit_large") if place.on_gpu else ("vit_tiny",):
        for strategy in PLANNED:
            yield Cell("memory, bytes", f"{model}, {strategy}", 120, partial(memory, model, strategy, 1))
        for ranks, strategy in product(place.several, SEVERAL):
            name = f"{model}, {strategy}, {ranks} ranks"
            yield Cell("memory, bytes", name, 180, partial(memory, model, strategy, ranks))
    for batch_size, steps in speed.STEPS.items():
        case = speed.limit_at(place.bench, batch_size, steps if place.on_gpu else 20)
        compiled = partial(place.bench.ours, steps, "--batch_size", str(batch_size), "--compile")
        for name, contender in {**case.contenders, **({"ours, compiled": compiled} if place.on_gpu else {})}.items():
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
    for name, more in {"eager": [], "compiled": ["--compile"]}.items():
        yield Cell("speed record", name, 400, partial(record, more))
    for strategy in LARGEST:
        yield Cell("largest model", strategy, 400, partial(largest, strategy))


def main() -> int:
    """Measures what is missing; returns the exit code, 1 if a cell failed."""
    parser = exits.Parser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="cpu: a small rehearsal")
    parser.add_argument("--minutes", type=float, default=60, help="stop in time (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("comparisons/gpu"), help="results (default: %(default)s)")
    parser.add_argument("--images", type=Path, help="a folder of real images for the speed record's accuracy")
    parser.add_argument("--again", nargs="+", default=[], metavar="PART", help="measure these parts again")
    given = harness.parse(parser)
    over = time.monotonic() + 60 * given.minutes
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out.absolute() / "results.json"
    results: dict[str, dict[str, Row]] = json.loads(file.read_text()) if file.exists() else {}
    results = {  # what failed is measured again too
        part: {name: row for name, row in rows.items() if "failed" not in row}
        for part, rows in results.items()
        if part not in given.again
    }
    title = harness.heading("gpu", 1, given.accelerator)
    with bench(given.accelerator) as made:
        ranks = gpu_count() if given.accelerator == "gpu" else RANKS[0]
        place = Place(made, given.out.absolute(), given.images and given.images.absolute(), ranks)
        for cell in cells(place):
            rows = results.setdefault(cell.part, {})
            left = over - time.monotonic()
            if cell.name in rows or left < 20:
                continue
            print(f"{cell.part}: {cell.name} ({left / 60:.1f} minutes left)", file=sys.stderr, flush=True)
            started = time.monotonic()
            try:
                rows[cell.name] = cell.measure(place, min(cell.seconds, left))
            except RunFailed as failure:
                if time.monotonic() > over - 1:
                    continue  # the time was up: measured by the next call
                rows[cell.name] = {"failed": str(failure)}
            rows[cell.name]["seconds"] = round(time.monotonic() - started, 1)
            write_json(file, results)
            (given.out / "results.md").write_text(f"{title}\n{tables(results)}")
        missing = sum(cell.name not in results.get(cell.part, {}) for cell in cells(place))
    print(tables(results))
    failed = [f"{part}: {name}" for part, rows in results.items() for name, row in rows.items() if "failed" in row]
    print("\n".join([*(f"failed   {name}" for name in failed), f"{missing} missing" * bool(missing)]))
    return int(bool(failed))


def tables(results: dict[str, dict[str, Row]]) -> str:
    """Returns a Markdown table of each part."""
    text = ""
    for part, rows in results.items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        text += f"\n| {part} | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|\n"
        for name, row in rows.items():
            shown = [str(row.get(column, "")).replace("\n", " ").replace("|", "\\|") for column in columns]
            text += f"| {name} | {' | '.join(shown)} |\n"
    return text


def doctor(place: Place, seconds: float) -> Row:
    """Returns the versions, and what the doctor warns of."""
    answer = json.loads(run("-m", "cifar_zero", "doctor", "--json", exit_code=None, seconds=seconds))
    found = {check["name"]: check["found"] for check in answer["checks"] if check["status"] == "ok"}
    row = {key: found.get(key, "") for key in ("gpu", "torch", "deepspeed")}
    for status in ("warning", "failed"):
        said = [f"{check['name']}: {check['found']}" for check in answer["checks"] if check["status"] == status]
        row |= {status: "; ".join(said)} if said else {}
    return row


def acceptance(ranks: int, place: Place, seconds: float) -> Row:
    """Returns how many cases of cifar-zero compare --acceptance pass, and what the others say."""
    name = f"acceptance-{ranks}"
    out = ["--out", str(place.out), "--name", name, "--devices", str(ranks)]
    quick = [] if place.on_gpu else ["--quick", "--strategies", "deepspeed_stage_2"]
    variants = compared(["--acceptance", *quick, *out], place.out / name, seconds)
    bad = [f"{each['name']}: {each['error'] or each['verdict']['remark']}" for each in variants if not good(each)]
    return {"cases": len(variants), "pass": len(variants) - len(bad)} | ({"failed": "; ".join(bad)} if bad else {})


def across_devices(place: Place, seconds: float) -> Row:
    """Returns the verdicts of runs on the GPU, with TF32 and without, against the same run on the CPU."""
    over = time.monotonic() + seconds
    recipe, names = [*place.flags("across"), *STEPS], ("baseline", "deepspeed_stage_2", "deepspeed_stage_3")
    run("train.py", *recipe, "--accelerator", "cpu", "--name", "cpu", seconds=over - time.monotonic())
    perturb = ("-m", "cifar_zero", "compare", "perturb")
    run(*perturb, *recipe, "--accelerator", "cpu", "--name", "moved", seconds=over - time.monotonic())
    for strategy in names:
        for tf32, environment in (("TF32", {}), ("no TF32", NO_TF32)):
            flags = ["--strategy", strategy, "--accelerator", place.bench.accelerator, "--name", f"{strategy}, {tf32}"]
            run("train.py", *recipe, *flags, extra_env=environment, seconds=over - time.monotonic())
    row, bad = dict[str, Any](), list[str]()
    for folder in sorted((place.out / "runs" / "across").glob("*, *TF32")):
        runs = [str(newest(folder.parent / name)) for name in ("cpu", "moved", folder.name)]
        out = ["--out", str(place.out), "--name", "across"]
        variants = compared(["--runs", *runs, *out], place.out / "across", over - time.monotonic())
        verdicts = [each["verdict"] for each in variants if each["verdict"]["kind"] != "reference"]
        row[folder.name] = ", ".join(f"{each['kind']} ({each['loss_difference']:.1e})" for each in verdicts)
        if "no TF32" in folder.name and not all(good(each) for each in variants):
            bad.append(folder.name)
    return row | ({"failed": ", ".join(bad)} if bad else {})


def resumed(relay: Sequence[tuple[str, str, int]], place: Place, seconds: float) -> Row:
    """Returns the losses of a run that each place of `relay` (accelerator, strategy, ranks) continues for ten steps,
    and how far the last one is from the loss of a run that the last place has trained alone."""
    over, row, name = time.monotonic() + seconds, dict[str, Any](), f"{len(relay)}-{relay[0][2]}"
    flags = [*place.flags("resumed"), *STEPS[2:], "--log_interval", "1", "--max_steps"]

    def loss(number: int, *more: str) -> float:
        accelerator, strategy, ranks = relay[number - 1]
        there = ["--accelerator", accelerator, "--strategy", strategy, "--devices", str(ranks)]
        left = over - time.monotonic()
        run("train.py", *flags, str(10 * number), *there, *more, extra_env=NO_TF32, seconds=left)
        folder = newest(place.out / "runs" / "resumed" / more[1])
        return json.loads((folder / "metrics.json").read_text())["train/loss"]

    resume = list[str]()
    for number, (accelerator, strategy, ranks) in enumerate(relay, 1):
        column = f"loss on the {accelerator}, {strategy}" + f", {ranks} ranks" * (ranks > 1)
        row[column] = loss(number, "--name", name, *resume)
        resume = ["--resume", str(newest(place.out / "runs" / "resumed" / name))]
    row["uninterrupted"] = loss(len(relay), "--name", f"{name}-whole")
    off = abs(row["uninterrupted"] - row[column])
    return row | ({} if off < LOSS_DIFFERENCE else {"failed": f"the loss is {off:.1e} off"})


def killed(ranks: int, place: Place, seconds: float) -> Row:
    """Returns how a run ends whose last rank is killed; it then resumes from its newest checkpoint."""
    over, output = time.monotonic() + seconds, place.out / f"killed-{ranks}.txt"
    out = Path(tempfile.mkdtemp(dir=place.bench.directory))
    flags = [*place.flags(""), "--out", str(out), "--accelerator", place.bench.accelerator, "--devices", str(ranks)]
    flags += ["--strategy", "deepspeed_stage_3", "--batch_size", str(32 * ranks), "--epochs", "100000"]
    environment = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    command = [sys.executable, "train.py", *flags, "--save_every_n_steps", "5"]
    with output.open("w") as file:
        launcher = psutil.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        while not checkpoints(out):
            if launcher.poll() is not None or time.monotonic() > over:
                raise RunFailed(f"wrote no checkpoint, see {output}")
            time.sleep(0.1)
        processes = launcher.children(recursive=True)
        (last,) = [rank for rank in launcher.children() if rank.environ().get("RANK") == str(ranks - 1)]
        last.kill()
        started = time.monotonic()
        launcher.wait(max(1.0, over - started))
        row: Row = {"seconds to the end": round(time.monotonic() - started, 1)}
    except psutil.TimeoutExpired as error:
        raise RunFailed(f"did not end after rank {ranks - 1} was killed, see {output}") from error
    finally:
        if launcher.poll() is None:
            launcher.kill()  # its ranks end with it
            launcher.wait()
    row |= {"exit code": launcher.returncode, "processes left": sum(process.is_running() for process in processes)}
    if f"error: rank {ranks - 1} ended with signal SIGKILL" not in output.read_text():
        row["failed"] = f"does not name the rank, see {output}"
    if (row["exit code"], row["processes left"]) != (1, 0):
        row["failed"] = f"did not end properly, see {output}"
    row["saved step"] = read(newest_checkpoint(out))["global_step"]
    resume = ["--resume", str(out), "--max_steps", str(row["saved step"] + 1)]
    run("train.py", *flags, *resume, seconds=over - time.monotonic())
    return row


def tests(group: str, place: Place, seconds: float) -> Row:
    """Returns how many tests of tests/gpu pass, and the names of the others, as far as the time allows."""
    report, each = place.out / f"tests-{group.split('::')[-1]}.xml", 100
    report.unlink(missing_ok=True)
    early = False
    limits = ["--timeout", str(each), "--session-timeout", str(max(1, round(seconds - each)))]
    try:
        run("-m", "pytest", "-q", f"tests/gpu/{group}", *limits, "--junitxml", str(report), seconds=seconds)
    except RunFailed as failure:
        if not report.exists():
            raise
        early = "session-timeout" in str(failure)
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [str(case.get("name")) for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    counts = {"passed": len(cases) - len(failed) - skipped, "skipped": skipped}
    counts |= {"ended early": "the time was up"} if early else {}
    return counts | ({"failed": ", ".join(failed)} if failed else {})


def memory(model: str, strategy: str, ranks: int, place: Place, seconds: float) -> Row:
    """Returns the planned and the measured bytes of a rank's model states and peak."""
    over = time.monotonic() + seconds
    recipe = ["--model", model, "--optimizer", "adamw", "--precision", "bf16-mixed", "--batch_size", str(16 * ranks)]
    recipe += ["--accelerator", place.bench.accelerator, "--devices", str(ranks)]
    command = ["-m", "cifar_zero", "plan", *recipe, "--device_memory", "130GB", "--json"]
    plan = json.loads(run(*command, seconds=seconds, exit_code=None))
    (planned,) = [row for row in plan["strategies"] if row["strategy"] == strategy]
    flags = [*place.flags("memory"), *recipe, "--strategy", strategy, "--name", f"{model}-{strategy}-{ranks}"]
    few_images = ["--data.synthetic_size", "640"]  # they are on the GPU too
    run("train.py", *flags, *few_images, "--bench_steps", "6", seconds=over - time.monotonic())
    metrics = json.loads(
        (newest(place.out / "runs" / "memory" / f"{model}-{strategy}-{ranks}") / "metrics.json").read_text()
    )
    states, peak = metrics["mem/model_state_rank_bytes"][0], metrics["mem/peak_rank_bytes"][0]
    expected = sum(sum(planned["states"][where].values()) for where in ("device", "host"))
    row = {"states planned": expected, "states": states, "peak planned": planned["device"], "peak": peak}
    off = [abs(row[f"{name} planned"] / row[name] - 1) for name in ("states", "peak")]
    wrong = off[0] > STATES_SHARE or (place.on_gpu and off[1] > PEAK_SHARE)
    row |= {"off": " and ".join(f"{share:.0%}" for share in off)}
    return row | ({"failed": f"planned states or peak off by {row['off']}"} if wrong else {})


def rates(contender: Callable[[], Any], place: Place, seconds: float) -> Row:
    """Returns the figures of one contender."""
    figures = contender()
    columns = ("images_per_second", "step_time_ms", "seconds_to_first_step")
    return {name: round(figures[name], 2) for name in columns if name in figures}


def record(more: Sequence[str], place: Place, seconds: float) -> Row:
    """Returns the accuracy and time of the speed record's recipe, of as many runs as there is time for."""
    data = ["--data.source", "folder", "--data.root", str(place.images)] if place.images else SMALL[:2]
    small = ["--model.width", "0.125", "--precision", "32-true", "--accelerator", "cpu", "--max_steps", "8"]
    flags = [*data, *more] if place.on_gpu else [*SMALL[:2], *small, *more]
    runs = "20" if place.on_gpu else "1"
    said = run("-m", "benchmarks.speedrun", "--runs", runs, *flags, seconds=seconds)
    found = dict(re.findall(r"^(accuracy|time|an epoch) (.*)$", said, re.MULTILINE))
    return {"images": "real" if place.images else "synthetic", "runs": runs, **found}


def largest(strategy: str, place: Place, seconds: float) -> Row:
    """Returns the deepest vision transformer that takes three steps; ends at the first that does not."""
    over, row = time.monotonic() + seconds, {}
    recipe = ["--model", "vit_1b", "--optimizer", "adamw", "--precision", "bf16-mixed", "--activation_checkpointing"]
    recipe += ["--batch_size", "16", "--strategy", strategy, "--bench_steps", "3", "--name", strategy]
    if not place.on_gpu:
        recipe[1] = "vit_tiny"
    for depth in DEPTHS if place.on_gpu else DEPTHS[:1]:
        try:
            flags = [*place.flags("largest"), *recipe, "--model.depth", str(depth)]
            run("train.py", *flags, seconds=over - time.monotonic())
        except RunFailed as failure:
            row["ends at"] = f"{depth} blocks: {str(failure).splitlines()[-1]}"
            break
        metrics = json.loads((newest(place.out / "runs" / "largest" / strategy) / "metrics.json").read_text())
        row |= {"parameters": metrics["parameters"], "TFLOPS": metrics["perf/tflops"]}
        row |= {"peak bytes": metrics["mem/peak_rank_bytes"][0], "images/s": metrics["perf/images_per_second"]}
    return row | ({} if "parameters" in row else {"failed": row.get("ends at", "no time")})


def compared(flags: Sequence[str], folder: Path, seconds: float) -> list[Row]:
    """Runs `cifar-zero compare`, which Ctrl-C ends with a report of what is finished; returns the variants of
    comparison.json."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cifar_zero", "compare", *flags], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    reports = sorted(folder.glob("*/comparison.json"), key=lambda file: file.stat().st_mtime)
    if not reports:
        raise RunFailed(f"cifar-zero compare ended with exit code {process.returncode} and wrote no report")
    return json.loads(reports[-1].read_text())["variants"]


def good(variant: Row) -> bool:
    """Whether a case or variant has passed."""
    return bool(variant["verdict"]) and variant["verdict"]["kind"] in GOOD


def newest(folder: Path) -> Path:
    """Returns the newest run folder of a name."""
    return max(folder.glob("version_*"), key=lambda version: int(version.name.removeprefix("version_")))


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
