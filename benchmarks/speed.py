"""Compares train.py with reference loops, in rounds of fresh processes.

docs/performance.md has a table for each comparison.

tutorial: compares the tutorial's recipe in train.py with the tutorial's own loop and with a bare loop.
limit: compares train.py with the limit of the hardware, a bare loop over images in memory. The bare loop is plain eager
PyTorch. In its tuned form it has the fused optimizer, and the threads, kernels and memory format that train.py chooses.
deepspeed: compares DeepSpeedExamples' recipe in train.py with the loop of DeepSpeedExamples' program, in float32 at
each ZeRO stage. With two ranks on the CPU, each rank of the loop gets a share of the cores, as in train.py, or all
cores, as where OMP_NUM_THREADS is not set.
data: compares the loaders alone with torchvision's CIFAR10 and torch's DataLoader, on synthetic images in memory.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.harness import Case
from benchmarks.runs import Bench, bench, last_json, run
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import core_count, gpu_count

STEPS = {4: 2000, 64: 500, 512: 100}  # timed steps of `limit` at each batch size


def main() -> int:
    """Measures the chosen comparison and returns the exit code."""
    parser = exits.Parser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("name", choices=CASES, help="the comparison to measure")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of runs (default: 5)")
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="auto: the GPU if any")
    parser.add_argument("--steps", type=int, help="tutorial, limit, deepspeed: timed steps of a run")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), help="deepspeed: default 0 1 2 3")
    ranks = "deepspeed: numbers of ranks (default: 1, and also 2 on the CPU or with two GPUs)"
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), help=ranks)
    arguments = harness.parse(parser)
    make, options = CASES[arguments.name]
    for option in ("steps", "stages", "ranks"):
        if getattr(arguments, option) is not None and option not in options:
            raise UsageError(f"--{option} does not work with {arguments.name}: leave it out")
    with bench(arguments.accelerator) as runner:
        return harness.measure_cases(arguments.name, make(runner, arguments), arguments)


def tutorial(runner: Bench, arguments: Namespace) -> list[Case]:
    """Returns the comparison of train.py with the tutorial's loop and a bare loop, with the tutorial's recipe."""
    steps = arguments.steps or STEPS[4]
    contenders = {
        "train.py": partial(runner.train_py, steps, "--config", "configs/tutorial.yaml"),
        "tutorial loop": partial(runner.reference, "tutorial", steps),
        "bare loop": partial(runner.reference, "bare", steps),
    }
    ratios = [("train.py", "tutorial loop"), ("train.py", "bare loop")]
    return [Case(f"configs/tutorial.yaml, batch 4, {runner.accelerator}", contenders, ratios)]


def limit(runner: Bench, arguments: Namespace) -> list[Case]:
    """Returns the comparisons of train.py with the bare loop, one for each batch size of STEPS."""
    cases = []
    for batch_size, default in STEPS.items():
        steps, batch = arguments.steps or default, ("--batch_size", str(batch_size))
        contenders = {
            "train.py": partial(runner.train_py, steps, "--config", "configs/tutorial.yaml", *batch),
            "bare loop": partial(runner.reference, "bare", steps, *batch),
            "bare loop, tuned": partial(runner.reference, "bare", steps, *batch, "--tuned"),
        }
        ratios = [("train.py", "bare loop"), ("train.py", "bare loop, tuned")]
        cases.append(Case(f"batch {batch_size}, {runner.accelerator}", contenders, ratios))
    return cases


def deepspeed(runner: Bench, arguments: Namespace) -> list[Case]:
    """Returns the comparisons with DeepSpeedExamples' loop, one for each ZeRO stage and number of ranks."""
    most = 2 if runner.accelerator == "cpu" else min(2, gpu_count())
    if max(arguments.ranks or [1]) > most:
        raise UsageError("--ranks 2 needs two GPUs: use --ranks 1, or --accelerator cpu")
    numbers = arguments.ranks or range(1, most + 1)
    stages = range(4) if arguments.stages is None else arguments.stages
    return [at_stage(runner, stage, ranks, arguments.steps or 300) for stage in stages for ranks in numbers]


def at_stage(runner: Bench, stage: int, ranks: int, steps: int) -> Case:
    """Returns the comparison with DeepSpeedExamples' loop at a ZeRO stage on a number of ranks."""
    recipe = ["--config", "configs/deepspeed.yaml", "--precision", "32-true"]
    recipe += ["--strategy", f"deepspeed_stage_{stage}", "--devices", str(ranks)]
    loop = partial(runner.reference, "deepspeed_loop", steps, "--stage", str(stage), "--ranks", str(ranks))
    contenders = {"train.py": partial(runner.train_py, steps, *recipe), "DeepSpeedExamples' loop": loop}
    if ranks > 1 and runner.accelerator == "cpu":
        all_cores = {"OMP_NUM_THREADS": str(core_count())}
        contenders["its loop, all cores for each rank"] = partial(loop, extra_env=all_cores)
    name = f"ZeRO {stage}, {ranks} {'rank' if ranks == 1 else 'ranks'}, {runner.accelerator}"
    return Case(name, contenders, [("train.py", other) for other in contenders if other != "train.py"])


def data(runner: Bench, arguments: Namespace) -> list[Case]:
    """Returns the comparison of this project's loaders with torchvision's CIFAR10."""
    torchvision_loader = "torchvision CIFAR10"
    contenders = {f"train.py, {loader}": partial(epoch, runner, loader) for loader in ("memory", "torch")}
    ratios = [(loader, torchvision_loader) for loader in contenders]
    contenders[torchvision_loader] = partial(epoch, runner, "torchvision")
    return [Case("50,000 synthetic images, batches of 64, without training", contenders, ratios)]


def epoch(runner: Bench, loader: str) -> Any:
    """Runs benchmarks.loops.loaders and returns the figures that it measured."""
    program = ("-m", "benchmarks.loops.loaders", loader, "--cache", str(runner.cache))
    return last_json(run(*program, extra_env={"OMP_NUM_THREADS": "1"}))  # as in torch's worker processes


CASES: dict[str, tuple[Callable[[Bench, Namespace], list[Case]], tuple[str, ...]]] = {
    "tutorial": (tutorial, ("steps",)),
    "limit": (limit, ("steps",)),
    "deepspeed": (deepspeed, ("steps", "stages", "ranks")),
    "data": (data, ()),
}
"""The comparisons by name, with their options."""

if __name__ == "__main__":
    exits.run(main)
