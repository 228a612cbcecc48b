"""The largest vision transformer that one device trains under each strategy, beside what plan.py says of it, and how
fast it trains: found by training it for a few steps with more and with fewer blocks.

On a GPU its memory is the limit; on the CPU a process is limited to --device_memory. Activation checkpointing, AdamW.
Ctrl-C ends with what is known. DeepSpeed's operators are built beforehand, with python doctor.py ops --build.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import harness, report
from benchmarks.contenders import last_json
from benchmarks.options import Options
from benchmarks.processes import RunFailed, run
from cifar_zero.config import command_line, rules
from cifar_zero.config.flags import Config
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import free_memory_bytes, gpu_count
from cifar_zero.models.vit_shapes import SHAPES
from cifar_zero.planning import machine, network
from cifar_zero.planning.machine import Room
from cifar_zero.planning.survey import PLANNED, survey

if TYPE_CHECKING:
    from cifar_zero.planning.activations import Line

CONTENDERS = ["deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload"]
CONTENDERS += ["deepspeed_stage_3_offload_nvme", "deepspeed_stage_3_superoffload"]

FULL = re.compile(
    r"memory is full|out of memory|bad_alloc|can't allocate|MemoryError|exit code -9|pinned_buffer' failed"
    r"|could not create a primitive"
)
"""How a run ends that had too little memory: known_failures.py's words, torch's, C++'s, killed by the system, or for
want of page-locked buffers of DeepSpeed's async_io; oneDNN's, which finds no room for a convolution's code."""

PRECISION, GROWTH = 0.1, 1.25
"""The search ends when the smallest that does not train has so much more blocks than the largest that does; as long as
all train, each has so many times the blocks of the one before."""


@dataclass
class Found:
    """Of one strategy, as far as is known.

    Attributes:
        planned: blocks of the largest network that plan.py has room for.
        largest: blocks of the largest network that was trained; 0: none.
        failed: blocks of the smallest one that had too little memory; None: none had.
        figures: metrics.json of the largest, and host_peak_bytes.
        refused: why the strategy cannot train here.
    """

    planned: int = 0
    largest: int = 0
    failed: int | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


def main() -> int:
    """Searches; returns the exit code, 1 where a run failed otherwise than for want of memory."""
    given = _parse()
    limit, gpu = _limit(given)
    harness.heed_sigterm()
    say = Console(stderr=True, highlight=False)
    found = {strategy: Found() for strategy in given.strategies}
    over, code = time.monotonic() + 60 * given.minutes, 0
    with tempfile.TemporaryDirectory(prefix="cifar-zero-largest-") as folder:
        bench = Trials(given, limit, gpu, Path(folder))
        try:
            for strategy, result in found.items():
                _search(bench, strategy, result, lambda: time.monotonic() < over, say)
        except KeyboardInterrupt:
            say.print("stopped by Ctrl-C")
            code = exits.CTRL_C
        except RunFailed as failure:
            say.print(f"failed: {failure}", markup=False, soft_wrap=True)
            code = 1
        _show(bench, found)
    return code


def _parse() -> Namespace:
    parser = exits.Parser(prog="python -m benchmarks.largest", description=__doc__)
    parser.add_argument("--strategies", nargs="+", default=CONTENDERS, choices=PLANNED, metavar="NAME")
    parser.add_argument("--device_memory", default="", metavar="SIZE", help="of the process, for the CPU: 3GB")
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="auto: the GPU if any")
    parser.add_argument("--size", choices=SHAPES, help="width and heads, of vit_SIZE (default: 1b, on the CPU tiny)")
    parser.add_argument("--batch_size", type=int, default=8, help="images (default: 8)")
    parser.add_argument("--precision", default="bf16-mixed", help="default: bf16-mixed")
    parser.add_argument("--nvme_path", default="", help="for deepspeed_stage_3_offload_nvme")
    parser.add_argument("--bench_steps", type=int, default=10, help="timed steps of each run (default: 10)")
    parser.add_argument("--minutes", type=float, default=60, help="after which no run is started (default: 60)")
    return parser.parse_args()


def _limit(given: Namespace) -> tuple[int, bool]:
    """Bytes that a process may take, 0 for no limit, and whether on the GPU."""
    gpu = given.accelerator != "cpu" and gpu_count() > 0
    if given.accelerator == "gpu" and not gpu:
        raise UsageError("--accelerator gpu: no GPU here that torch can use")
    if gpu and given.device_memory:
        raise UsageError("--device_memory limits processes on the CPU: a GPU's own memory is its limit")
    if not gpu and not given.device_memory:
        raise UsageError("--device_memory SIZE is needed on the CPU, for instance 3GB")
    if given.bench_steps < 1:
        raise UsageError(f"--bench_steps must be at least 1, not {given.bench_steps}")
    given.size = given.size or ("1b" if gpu else "tiny")
    return (0 if gpu else machine.size_in_bytes(given.device_memory, "--device_memory")), gpu


class Trials:
    """Trainings of a network with so many blocks, and plans of them.

    Args:
        given: the command line.
        limit: bytes that a process may take; 0: no limit.
        gpu: whether on the GPU.
        folder: for images and runs.
    """

    def __init__(self, given: Namespace, limit: int, gpu: bool, folder: Path):
        self.given, self.limit, self.gpu, self._folder = given, limit, gpu, folder
        self._lines: defaultdict[int, dict[str, Line]] = defaultdict(dict)
        """Activations by depth: what takes a plan its seconds."""

    def flags(self, strategy: str, depth: int) -> list[str]:
        """The run's, without its length."""
        given = self.given
        flags = ["--model", f"vit_{given.size}", "--model.depth", str(depth), "--strategy", strategy]
        flags += ["--batch_size", str(given.batch_size), "--precision", given.precision, "--optimizer", "adamw"]
        flags += ["--activation_checkpointing", "--accelerator", "gpu" if self.gpu else "cpu"]
        flags += ["--nvme_path", given.nvme_path] if given.nvme_path else []
        flags += ["--data.source", "synthetic", "--data.synthetic_size", "640", "--data.val_fraction", "0"]
        return [*flags, "--data.root", str(self._folder / "data"), "--logger", "none"]

    def refusal(self, strategy: str) -> str:
        """Why train.py would not start it; empty where it would."""
        try:
            rules.settle(command_line.parse(self.flags(strategy, 1)))
        except UsageError as error:
            return str(error)
        return ""

    def train(self, strategy: str, depth: int) -> dict[str, Any] | None:
        """Trains for a while: metrics.json and host_peak_bytes, or None where there was too little memory.

        Raises:
            RunFailed: it failed otherwise.
        """
        length = ["--bench_steps", str(self.given.bench_steps)]
        with tempfile.TemporaryDirectory(dir=self._folder) as out:
            program = ["-m", "benchmarks.limited", str(self.limit), "train.py"]
            try:
                finished = run(*program, *self.flags(strategy, depth), *length, "--out", out)
            except RunFailed as failure:
                if FULL.search(str(failure)):
                    return None
                raise
            (file,) = Path(out).glob("*/version_*/metrics.json")
            return {**json.loads(file.read_text()), **last_json(finished.stdout)}

    def fits(self, strategy: str, depth: int) -> bool:
        """Whether plan.py has room for it."""
        config = command_line.parse(self.flags(strategy, depth))
        config.accelerator = "gpu" if self.gpu else "cpu"
        (need,) = survey(config, network.of(config), self._room(config), self._lines[depth], [strategy])
        return need.fits

    def parameters(self, depth: int) -> int:
        """Of the network."""
        return network.of(command_line.parse(self.flags("baseline", depth))).elements

    def _room(self, config: Config) -> Room:
        disk = machine.disk_bytes(config.nvme_path, 1)
        if self.gpu:
            return Room(machine.free_gpu_bytes(1), free_memory_bytes(), disk=disk)
        return Room(max(0, self.limit - machine.CPU_RANK_BYTES), None, shared=True, disk=disk)


def _search(bench: Trials, strategy: str, result: Found, has_time: Callable[[], bool], say: Console) -> None:
    """Fills in what is found, as it is found."""
    result.refused = bench.refusal(strategy)
    if result.refused:
        return
    planned_too_large: int | None = None
    while (depth := next_depth(result.planned, planned_too_large, 1, growth=4, precision=0)) is not None:
        if bench.fits(strategy, depth):
            result.planned = depth
        else:
            planned_too_large = depth
    while has_time():
        depth = next_depth(result.largest, result.failed, max(1, result.planned), GROWTH, PRECISION)
        if depth is None:
            break
        say.print(f"{strategy}: {depth} blocks, {bench.parameters(depth) / 1e6:,.1f} million parameters", end=": ")
        figures = bench.train(strategy, depth)
        if figures is None:
            result.failed = depth
        else:
            result.largest, result.figures = depth, figures
        say.print("too little memory" if figures is None else "trains")


def next_depth(largest: int, failed: int | None, guess: int, growth: float, precision: float) -> int | None:
    """The number of blocks to try next; None where the search is at its end.

    Args:
        largest: that fits, as far as is known; 0: none.
        failed: the smallest that does not; None: none.
        guess: to begin with.
        growth: factor to the next, as long as all fit.
        precision: share of the largest that may be between it and the smallest that does not fit.
    """
    if failed is None:
        return math.ceil(largest * growth) if largest else guess
    return None if failed - largest <= max(1, precision * largest) else (largest + failed) // 2


def _show(bench: Trials, found: dict[str, Found]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else report.WIDTH)
    given = bench.given
    limit = "the GPU's memory" if bench.gpu else f"{given.device_memory} for the process"
    console.print(f"vit_{given.size} of as many blocks as train: adamw, {given.precision}, {limit}", soft_wrap=True)
    console.print(f"micro-batch of {given.batch_size} images, activation checkpointing", soft_wrap=True)
    for line in report.machine(Options(1, None, True, "gpu" if bench.gpu else "cpu")):
        console.print(line, markup=False, soft_wrap=True)
    table = Table(box=box.MARKDOWN)
    for name in ("strategy", "blocks", "million parameters", "planned", "images/s", "TFLOPS", "GPU, GB", "host, GB"):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for strategy, result in found.items():
        table.add_row(strategy, *_cells(bench, result))
    console.print(table)
    for strategy, result in found.items():
        if result.refused:
            console.print(f"{strategy}: {result.refused}", markup=False, soft_wrap=True)


def _cells(bench: Trials, result: Found) -> list[str]:
    figures, measured = result.figures, ["-", "-", "-", "-"]
    if figures:
        speed = [f"{figures['perf/images_per_second']:,.1f}", f"{figures['perf/tflops']:.3g}"]
        peaks = [max(figures["mem/peak_rank_bytes"]) if bench.gpu else None, figures["host_peak_bytes"]]
        measured = [*speed, *("-" if peak is None else f"{peak / 1e9:.2f}" for peak in peaks)]
    sizes = [
        "-" if not depth else f"{bench.parameters(depth) / 1e6:,.1f}" for depth in (result.largest, result.planned)
    ]
    more = "" if result.failed or not result.largest else " or more"
    return [f"{result.largest or '-'}{more}", *sizes, *measured]


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
