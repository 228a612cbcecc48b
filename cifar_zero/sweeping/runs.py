"""The runs of a sweep: flags, names, devices, and the metric that they end with; torch only with a GPU driver."""

import json
import os
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from cifar_zero.checkpoints import run_folder
from cifar_zero.config import command_line
from cifar_zero.config.ds_config import flags_of as flags_of
from cifar_zero.config.rules.devices import CPU_RANK_BYTES
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.core.hardware import core_count, free_memory_bytes, gpu_count, share_of_cores
from cifar_zero.training import run_process
from cifar_zero.training.resolve import resolve

VALIDATION = "val/acc"

METRICS: dict[str, Literal["maximize", "minimize"]] = {
    VALIDATION: "maximize",
    "train/loss": "minimize",
    "perf/images_per_second": "maximize",
    "perf/step_time_ms": "minimize",
}
"""Keys of metrics.json that settings can be chosen by. None of the test set: the best of many draws is too good, and
the test would say nothing about new images. For the same reason val/acc is a run's last validation, not its best."""

VISIBLE = "CUDA_VISIBLE_DEVICES"  # the GPUs that CUDA shows a process, and torch on ROCm too

Slot = tuple[dict[str, str], set[int]]
"""The devices of one run: extra environment variables, and the cores that it is bound to (none: all)."""


def name_of(options: dict[str, Any]) -> str:
    """Returns the name of the run with these options: optimizer.lr_0.1-seed_0."""
    name = re.sub(r"[^\w.+-]+", "_", "-".join(f"{key}_{shown(value, 6)}" for key, value in options.items()))
    return name if len(name) < 200 else f"{name[:190]}-{zlib.crc32(name.encode()):08x}"  # file systems end at 255


def shown(value: Any, digits: int = 4) -> str:
    """Returns a value as text, a number with so many digits."""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def resolved(flags: list[str], metric: str) -> Run:
    """Returns a resolved run; raises UsageError if it cannot be trained, or not by a sweep."""
    config = command_line.parse(flags)
    for name in ("bench_steps", "find_lr", "plot_schedule", "check_gradients", "resume"):
        if getattr(config, name):
            raise UsageError(f"--{name} cannot be used with sweep.py: leave it out")
    if config.strategy == AUTO or config.num_nodes > 1:
        raise UsageError("sweep.py takes neither --strategy auto nor --num_nodes: name a strategy for this machine")
    if metric == VALIDATION and not config.data.val_fraction:
        raise UsageError(f"--metric {VALIDATION} needs validation images: add --data.val_fraction 0.1")
    devices = 1 if config.devices == "auto" else config.devices  # many runs at a time rather than many GPUs for each
    return resolve(replace(config, devices=devices), command_line.consent(flags))


def slots(planned: list[Run], parallel: int | None, runs: int) -> list[Slot]:
    """Returns `parallel` slots (None: as many as there are devices for), at most one for each run."""
    ranks = max(run.config.world_size for run in planned)
    if any(run.spec.offload_optimizer == "nvme" for run in planned):
        parallel = 1  # DeepSpeed (0.19.8, partitioned_param_swapper.py) clears a folder that two runs would share
    if not all(run.on_cpu for run in planned):
        gpus = os.environ.get(VISIBLE, ",".join(map(str, range(gpu_count())))).split(",")[: gpu_count()]
        groups = [gpus[first : first + ranks] for first in range(0, len(gpus) - ranks + 1, ranks)]
        numbers = range(min(parallel or len(groups), runs))  # more slots than groups share them
        return [({VISIBLE: ",".join(groups[number % len(groups)])}, set()) for number in numbers]
    room = min(core_count() // ranks, free_memory_bytes() // (ranks * CPU_RANK_BYTES))
    count = min(parallel or max(1, room), runs)
    return [({}, share_of_cores(number, count)) for number in range(count)]


def result(out: Path, name: str, metric: str) -> dict[str, Any] | None:
    """Returns the result of a finished run as sweep.json has it; raises RunError if it ended without the metric."""
    finished = [folder for folder in run_process.folders(out, name) if (folder / run_folder.METRICS).is_file()]
    if not finished:
        return None
    metrics = json.loads((finished[-1] / run_folder.METRICS).read_text())
    value = metrics.get(metric)
    if value is None and metric == VALIDATION:  # resumed after its last validation, a run does not repeat it
        value = (validations(out, name) or [None])[-1]
    if value is None:
        raise RunError(f"it ended without {metric}; {VALIDATION} needs an epoch that ends before --max_steps")
    return {"value": value, "folder": str(finished[-1]), "seconds": metrics["perf/fit_seconds"] or 0.0}


def validations(out: Path, name: str) -> list[float]:
    """Returns val/acc after each epoch of a run so far, from the event files of TensorBoard in its run folders."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    found: dict[int, float] = {}  # by step: a resumed run may repeat a validation
    for folder in run_process.folders(out, name):
        events = EventAccumulator(str(folder), size_guidance={SCALARS: 0}).Reload()
        if VALIDATION in events.Tags()[SCALARS]:
            found |= {point.step: point.value for point in events.Scalars(VALIDATION)}
    return [found[step] for step in sorted(found)]
