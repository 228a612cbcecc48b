"""Ours against reference loops, in rounds of fresh processes; docs/performance.md has a table of each measurement.

tutorial: the tutorial's recipe, against the tutorial's own loop and a bare one.
limit: how close train.py comes to the limit of the hardware, a bare loop over images in memory: plain eager PyTorch, or
tuned by the fused optimizer and by the threads, kernels and memory format that train.py chooses.
deepspeed: DeepSpeedExamples' recipe in float32 at each ZeRO stage, against the loop of its program; on the CPU with a
share of the cores for each of two ranks, as ours, or with all of them, as where OMP_NUM_THREADS is not set.
startup: from the command to the end of the first optimizer step, against the import of the libraries alone; and the
whole time of commands that train nothing.
data: the loaders alone, against torchvision's datasets with torch's DataLoader, on synthetic images in memory, and with
--root on a folder too, which ours decodes once and torchvision's ImageFolder in each epoch. With --sizes: our memory
loader alone on so many images, which are in memory at the start, or on the disk.
threads: how long a step's threads spin before they sleep (GOMP_SPINCOUNT), and one thread; alone, and next to a busy
program on each core.
"""

import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.harness import Case
from benchmarks.runs import Bench, bench, last_json, run
from cifar_zero.config.settings import DataConfig
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import core_count, gpu_count
from cifar_zero.data import prepare

STEPS = {4: 2000, 64: 500, 512: 100}  # timed steps of `limit` at each batch size
THREADED = (("net", 32, 200), ("net", 64, 100), ("net", 512, 30), ("resnet18", 32, 4))
"""Models, batch sizes and timed steps of `threads`. A step of fewer images of Net has one thread."""

IMPORTS = "python -c 'import torch, lightning'"

ANSWERS = {
    "--help": partial(run, "train.py", "--help"),
    "--print_config": partial(run, "train.py", "--config", "configs/tutorial.yaml", "--print_config"),
    "an unknown option": partial(run, "train.py", "--batch_sise", "8", exit_code=2),
}
"""Commands that train nothing."""


def main() -> int:
    """Measures; returns the exit code."""
    parser = exits.Parser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("name", choices=CASES, help="what is measured")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of runs (default: 5)")
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="auto: the GPU if any")
    parser.add_argument("--steps", type=int, help="tutorial, limit, deepspeed: timed steps of a run")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), help="deepspeed: default 0 1 2 3")
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), help="deepspeed: default 1, and 2 if there are")
    parser.add_argument("--root", help="data: a folder of images, with train/ and test/ as --data.source folder")
    parser.add_argument("--sizes", type=int, nargs="+", help="data: numbers of images, ours against the first of them")
    given = harness.parse(parser)
    make, options = CASES[given.name]
    for option in ("steps", "stages", "ranks", "root", "sizes"):
        if getattr(given, option) is not None and option not in options:
            raise UsageError(f"--{option} is not for {given.name}: leave it out")
    with bench(given.accelerator) as place:
        return harness.compare(given.name, make(place, given), given)


def tutorial(place: Bench, given: Namespace) -> list[Case]:
    """Returns the comparison of the tutorial's recipe."""
    steps = given.steps or STEPS[4]
    contenders = {
        "ours": partial(place.ours, steps, "--config", "configs/tutorial.yaml"),
        "tutorial loop": partial(place.reference, "tutorial", steps),
        "bare loop": partial(place.reference, "bare", steps),
    }
    ratios = [("ours", "tutorial loop"), ("ours", "bare loop")]
    return [Case(f"configs/tutorial.yaml, batch 4, {place.accelerator}", contenders, ratios)]


def limit(place: Bench, given: Namespace) -> list[Case]:
    """Returns the comparisons with the bare loop."""
    return [limit_at(place, batch_size, given.steps or STEPS[batch_size]) for batch_size in STEPS]


def limit_at(place: Bench, batch_size: int, steps: int) -> Case:
    """Returns the comparison with the bare loop at a batch size."""
    batch = ("--batch_size", str(batch_size))
    contenders = {
        "ours": partial(place.ours, steps, "--config", "configs/tutorial.yaml", *batch),
        "bare loop": partial(place.reference, "bare", steps, *batch),
        "bare loop, tuned": partial(place.reference, "bare", steps, *batch, "--tuned"),
    }
    ratios = [("ours", "bare loop"), ("ours", "bare loop, tuned")]
    return Case(f"batch {batch_size}, {place.accelerator}", contenders, ratios)


def deepspeed(place: Bench, given: Namespace) -> list[Case]:
    """Returns the comparisons of DeepSpeedExamples' recipe."""
    most = 2 if place.accelerator == "cpu" else min(2, gpu_count())
    if max(given.ranks or [1]) > most:
        raise UsageError("--ranks 2 needs two GPUs: use --ranks 1, or --accelerator cpu")
    numbers = given.ranks or range(1, most + 1)
    stages = range(4) if given.stages is None else given.stages
    return [at_stage(place, stage, ranks, given.steps or 300) for stage in stages for ranks in numbers]


def at_stage(place: Bench, stage: int, ranks: int, steps: int) -> Case:
    """Returns the comparison at a ZeRO stage on a number of ranks."""
    recipe = ["--config", "configs/deepspeed.yaml", "--precision", "32-true"]
    recipe += ["--strategy", f"deepspeed_stage_{stage}", "--devices", str(ranks)]
    loop = partial(place.reference, "deepspeed_loop", steps, "--stage", str(stage), "--ranks", str(ranks))
    contenders = {"ours": partial(place.ours, steps, *recipe), "DeepSpeedExamples' loop": loop}
    if ranks > 1 and place.accelerator == "cpu":
        all_cores = {"OMP_NUM_THREADS": str(core_count())}
        contenders["its loop, all cores for each rank"] = partial(loop, extra_env=all_cores)
    name = f"ZeRO stage {stage}, {ranks} rank{'s'[: ranks > 1]}, {place.accelerator}"
    return Case(name, contenders, [("ours", other) for other in contenders if other != "ours"])


def startup(place: Bench, given: Namespace) -> list[Case]:
    """Returns the comparison of the starts of trainings, and that of the commands that train nothing."""

    def training(strategy: str, ranks: int) -> dict[str, float]:
        figures = place.ours(1, "--strategy", strategy, "--devices", str(ranks))
        return {"seconds": figures["seconds_to_first_step"]}

    runs = {IMPORTS: partial(timed, partial(run, "-c", "import torch, lightning"))}
    runs |= {strategy: partial(training, strategy, 1) for strategy in ("baseline", "deepspeed_stage_2")}
    ratios = [("baseline", IMPORTS), ("deepspeed_stage_2", "baseline")]
    if place.accelerator == "cpu" or gpu_count() > 1:
        runs |= {f"{strategy}, 2 ranks": partial(training, strategy, 2) for strategy in ("ddp", "deepspeed_stage_2")}
        ratios += [("ddp, 2 ranks", "baseline"), ("deepspeed_stage_2, 2 ranks", "deepspeed_stage_2")]
    answers = {name: partial(timed, answer) for name, answer in ANSWERS.items()}
    first = Case(f"from the command to the first optimizer step, {place.accelerator}", runs, ratios, "seconds")
    return [first, Case("whole commands that train nothing (limit: 1 s)", answers)]


def timed(command: Callable[[], str]) -> dict[str, float]:
    """Returns the seconds from the start of a command to its end."""
    started = time.perf_counter()
    command()
    return {"seconds": time.perf_counter() - started}


def data(place: Bench, given: Namespace) -> list[Case]:
    """Returns the comparisons of the loaders."""
    if given.sizes:
        return at_sizes(place, given.sizes)
    kinds: dict[str, tuple[str, ...]] = {"50,000 synthetic images": ("torchvision CIFAR10",)}
    if given.root:
        seconds = epoch(place, "memory", "--root", given.root)["seconds_to_first_batch"]
        print(f"ours decoded {given.root} in {seconds:.1f} s, once")
        kinds[given.root] = ("torchvision ImageFolder", "--root", given.root)
    cases = []
    for images, (theirs, *flags) in kinds.items():
        runs = {f"ours, {loader}": partial(epoch, place, loader, *flags) for loader in ("memory", "torch")}
        ratios = [(ours, theirs) for ours in runs]
        runs[theirs] = partial(epoch, place, "torchvision", *flags)
        cases.append(Case(f"{images}, batches of 64, without training", runs, ratios))
    return cases


def at_sizes(place: Bench, sizes: list[int]) -> list[Case]:
    """Returns the comparisons of the memory loader with itself at several numbers of images."""
    for size in sizes:
        prepare(DataConfig(source="synthetic", cache=str(place.cache), synthetic_size=size))
    names = [f"{size:,}" for size in sizes]

    def case(start: str, *flags: str) -> Case:
        epochs = [partial(epoch, place, "memory", "--size", str(size), *flags) for size in sizes]
        ratios = [(name, names[0]) for name in names[1:]]
        return Case(
            f"number of images {start}, memory loader, batches of 64, without training",
            dict(zip(names, epochs, strict=True)),
            ratios,
        )

    return [case("in memory at the start"), case("on the disk at the start", "--cold")]


def epoch(place: Bench, loader: str, *flags: str) -> Any:
    """Runs benchmarks.loops.loaders and returns the figures of its epoch."""
    program = ("-m", "benchmarks.loops.loaders", loader, "--cache", str(place.cache))
    return last_json(run(*program, *flags, extra_env={"OMP_NUM_THREADS": "1"}))  # as torch sets it in its workers


def threads(place: Bench, given: Namespace) -> list[Case]:
    """Returns the comparisons of how threads wait."""
    settings = {f"GOMP_SPINCOUNT={count}": {"GOMP_SPINCOUNT": count} for count in ("300000", "10000", "1000", "0")}
    settings["OMP_NUM_THREADS=1"] = {"OMP_NUM_THREADS": "1"}
    cases = []
    for model, batch_size, steps in THREADED:
        flags = ("--model", model, "--batch_size", str(batch_size))
        alone = {
            name: partial(place.ours, given.steps or steps, *flags, extra_env=env) for name, env in settings.items()
        }
        next_to = {name: partial(next_to_others, run) for name, run in alone.items()}
        ratios = [(name, "GOMP_SPINCOUNT=300000") for name in settings]  # libgomp's default
        cases.append(Case(f"{model}, batch {batch_size}, alone", alone, ratios))
        cases.append(Case(f"{model}, batch {batch_size}, next to a busy program on each core", next_to, ratios))
    return cases


def next_to_others(contender: Callable[[], Any]) -> Any:
    """Returns the figures of a run next to a busy program on each core."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(core_count())]
    try:
        return contender()
    finally:
        for program in busy:
            program.kill()
            program.wait()


CASES: dict[str, tuple[Callable[[Bench, Namespace], list[Case]], tuple[str, ...]]] = {
    "tutorial": (tutorial, ("steps",)),
    "limit": (limit, ("steps",)),
    "deepspeed": (deepspeed, ("steps", "stages", "ranks")),
    "startup": (startup, ()),
    "threads": (threads, ("steps",)),
    "data": (data, ("root", "sizes")),
}
"""The comparisons by name, with their options."""

if __name__ == "__main__":
    sys.exit(exits.guarded(main))
