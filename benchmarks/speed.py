"""Compares train.py with reference loops, in rounds of fresh processes.

docs/performance.md has a table for each comparison.

tutorial: compares the tutorial's recipe in train.py with the tutorial's own loop and with a bare loop.
limit: compares train.py with the limit of the hardware, a bare loop over images in memory. The bare loop is plain eager
PyTorch. In its tuned form it has the fused optimizer, and the threads, kernels and memory format that train.py chooses.
deepspeed: compares DeepSpeedExamples' recipe in train.py with the loop of DeepSpeedExamples' program, in float32 at
each ZeRO stage. With two ranks on the CPU, each rank of the loop gets a share of the cores, as in train.py, or all
cores, as where OMP_NUM_THREADS is not set.
data: compares the loaders alone with torchvision's CIFAR10 and torch's DataLoader, on synthetic images in memory.
audit: compares a training whose steps are all audited with one that is not. vit_tiny is trained in bfloat16 under plain
PyTorch and ZeRO 2, on a GPU also compiled.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Case, Figures
from benchmarks.runs import Bench, bench, last_json, run
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import core_count, gpu_count

STEPS = {4: 2000, 64: 500, 512: 100}  # timed steps of `limit` at each batch size


def main() -> int:
    parser = exits.Parser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("name", choices=CASES, help="the comparison to measure")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of runs (default: 5)")
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="auto: the GPU if any")
    parser.add_argument("--steps", type=int, help="timed steps of a run (not for data)")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), help="deepspeed: default 0 1 2 3")
    ranks = "deepspeed: numbers of ranks (default: 1, and also 2 on the CPU or with two GPUs)"
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), help=ranks)
    checkout = "tutorial, limit, deepspeed: another checkout of this repository, whose train.py is measured too"
    parser.add_argument("--checkout", type=Path, metavar="FOLDER", help=checkout)
    arguments = harness.parse(parser)
    make, options = CASES[arguments.name]
    for option in ("steps", "stages", "ranks", "checkout"):
        if getattr(arguments, option) is not None and option not in options:
            raise UsageError(f"--{option} does not work with {arguments.name}: leave it out")
    with ExitStack() as stack:
        benches = {"train.py": stack.enter_context(bench(arguments.accelerator))}
        if folder := arguments.checkout:
            benches[f"train.py in {folder}"] = stack.enter_context(bench(arguments.accelerator, folder.absolute()))
        harness.measure_cases(arguments.name, make(benches, arguments), arguments)
    return 0


Benches = Mapping[str, Bench]  # by the name of what they measure: this program, and another state of it


def tutorial(benches: Benches, arguments: Namespace) -> list[Case]:
    """Returns the comparison of train.py with the loop of PyTorch's tutorial and with a bare loop, all with the
    tutorial's recipe."""
    steps, reference = arguments.steps or STEPS[4], benches["train.py"].reference
    loops = {f"{loop} loop": partial(reference, loop, steps) for loop in ("tutorial", "bare")}
    programs = train_py(benches, steps, "--config", "configs/tutorial.yaml")
    return [Case(f"configs/tutorial.yaml, batch 4, {arguments.accelerator}", programs, loops)]


def limit(benches: Benches, arguments: Namespace) -> list[Case]:
    """Returns the comparisons of train.py with the bare loop, one for each batch size of STEPS."""
    cases, reference = [], benches["train.py"].reference
    for batch_size, default in STEPS.items():
        steps, batch = arguments.steps or default, ("--batch_size", str(batch_size))
        programs = train_py(benches, steps, "--config", "configs/tutorial.yaml", *batch)
        loops = {
            "bare loop": partial(reference, "bare", steps, *batch),
            "bare loop, tuned": partial(reference, "bare", steps, *batch, "--tuned"),
        }
        cases.append(Case(f"batch {batch_size}, {arguments.accelerator}", programs, loops))
    return cases


def deepspeed(benches: Benches, arguments: Namespace) -> list[Case]:
    """Returns the comparisons with DeepSpeedExamples' loop, one for each ZeRO stage and number of ranks."""
    most = 2 if arguments.accelerator == "cpu" else min(2, gpu_count())
    if max(arguments.ranks or [1]) > most:
        raise UsageError("--ranks 2 needs two GPUs: use --ranks 1, or --accelerator cpu")
    numbers = arguments.ranks or range(1, most + 1)
    stages = range(4) if arguments.stages is None else arguments.stages
    return [at_stage(benches, stage, ranks, arguments.steps or 300) for stage in stages for ranks in numbers]


def at_stage(benches: Benches, stage: int, ranks: int, steps: int) -> Case:
    """Returns the comparison with DeepSpeedExamples' loop at a ZeRO stage on a number of ranks."""
    recipe = ["--config", "configs/deepspeed.yaml", "--precision", "32-true"]
    recipe += ["--strategy", f"deepspeed_stage_{stage}", "--devices", str(ranks)]
    runner = benches["train.py"]
    loop = partial(runner.reference, "deepspeed_loop", steps, "--stage", str(stage), "--ranks", str(ranks))
    loops = {"DeepSpeedExamples' loop": loop}
    if ranks > 1 and runner.accelerator == "cpu":
        all_cores = {"OMP_NUM_THREADS": str(core_count())}
        loops["its loop, all cores for each rank"] = partial(loop, extra_env=all_cores)
    name = f"ZeRO {stage}, {ranks} {'rank' if ranks == 1 else 'ranks'}, {runner.accelerator}"
    return Case(name, train_py(benches, steps, *recipe), loops)


def train_py(benches: Benches, steps: int, *flags: str) -> Mapping[str, Callable[[], Figures]]:
    return {name: partial(each.train_py, steps, *flags) for name, each in benches.items()}


def data(benches: Benches, arguments: Namespace) -> list[Case]:
    """Returns the comparison of this project's loaders with torchvision's CIFAR10."""
    cache = benches["train.py"].cache
    loaders = {f"train.py, {loader}": partial(epoch, cache, loader) for loader in ("memory", "torch")}
    references = {"torchvision CIFAR10": partial(epoch, cache, "torchvision")}
    return [Case("50,000 synthetic images, batches of 64, without training", loaders, references)]


def audit(benches: Benches, arguments: Namespace) -> list[Case]:
    """Returns the comparisons of audited trainings with the same trainings without the audit: one for each strategy,
    and on a GPU also one for each strategy with --compile."""
    runner = benches["train.py"]
    on_gpu = runner.accelerator == "gpu"
    recipe = ["--model", "vit_tiny", "--precision", "bf16-mixed", "--batch_size", "512" if on_gpu else "32"]
    placements = {"plain": [], "ZeRO 2": ["--strategy", "deepspeed_stage_2"]}
    if on_gpu:
        placements |= {f"{name}, compiled": [*flags, "--compile"] for name, flags in placements.items()}
    cases = []
    for name, flags in placements.items():
        program = partial(runner.train_py, arguments.steps or (200 if on_gpu else 20), *recipe, *flags)
        cases.append(Case(f"vit_tiny, {name}", {"audited": partial(program, "--audit")}, {"not audited": program}))
    return cases


def epoch(cache: Path, loader: str) -> Any:
    """Runs benchmarks.loops.loaders with the loader of this name, and returns the figures that it measured."""
    program = ("-m", "benchmarks.loops.loaders", loader, "--cache", str(cache))
    return last_json(run(*program, extra_env={"OMP_NUM_THREADS": "1"}))  # as in torch's worker processes


CASES: dict[str, tuple[Callable[[Benches, Namespace], list[Case]], tuple[str, ...]]] = {
    "tutorial": (tutorial, ("steps", "checkout")),
    "limit": (limit, ("steps", "checkout")),
    "deepspeed": (deepspeed, ("steps", "stages", "ranks", "checkout")),
    "data": (data, ()),
    "audit": (audit, ("steps",)),
}
"""The comparisons by name, each with the options that it accepts."""

if __name__ == "__main__":
    exits.run(main)
