"""The end of a run: metrics.json, and the tables printed from it."""

import json
import math
import platform
import shlex
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cifar_zero.core import atomic
from cifar_zero.core.console import next_to_python

SCHEMA = 1  # version of metrics.json's keys; raised when a key changes its meaning

REPOSITORY = Path(__file__).parents[2]

IN_EFFECT = ("compute_dtype", "parameter_dtype", "skipped_steps", "reduce_bucket_size", "allgather_bucket_size")
"""Keys of metrics.json with the settings actually in effect."""

MEASURED = (
    *("dataset", "num_train", "num_test", "model", "parameters", "trained_parameters"),
    *("strategy", "world_size", "num_nodes"),
    *("accelerator", "device_name", "precision", "seed", "batch_size", "micro_batch_size", "accumulate"),
    *("epochs", "steps", "train/loss", "val/acc", "test/loss", "test/acc", "test/acc_per_class"),
    *("test/acc_top5", "test/precision", "test/recall", "test/f1", "test/precision_weighted", "test/f1_weighted"),
    *("test/auroc", "test/average_precision", "test/calibration_error", "test/precision_per_class"),
    *("test/recall_per_class", "test/f1_per_class", "test/auroc_per_class", "test/average_precision_per_class"),
    *("perf/images_per_second", "perf/tokens_per_second", "perf/step_time_ms", "perf/data_time_ms"),
    *("perf/tflops", "perf/mfu"),
    *("perf/seconds_to_first_step", "perf/fit_seconds", "mem/peak_rank_bytes", "mem/model_state_rank_bytes"),
    *("mem/parameter_rank_bytes", "mem/gradient_rank_bytes", "mem/optimizer_rank_bytes"),
    *IN_EFFECT,
)
"""Keys of metrics.json that a run fills in, in their order; null if the run has no such value."""

FALLBACK = "fallback"
"""Key of metrics.json that exists only if the data is not what was asked for: one line that says so."""

SHOWN = {
    "precision": "macro precision",
    "recall": "macro recall",
    "f1": "macro F1",
    "acc_top5": "top-5 accuracy",
    "auroc": "macro AUROC",
    "average_precision": "macro average precision",
    "calibration_error": "calibration error",
}
"""Metrics of a test that are printed below its table."""

MOST_ROWS = 25  # classes that the table of a test has rows for; metrics.json has all

PACKAGES = ("torch", "lightning", "deepspeed", "torchmetrics")


def metrics_json(measured: Mapping[str, Any], fell_back: bool = False) -> dict[str, Any]:
    """Returns the contents of metrics.json, its keys in their order; `fell_back`: to the embedded digits."""
    metrics = {"schema": SCHEMA, **{key: measured.get(key) for key in MEASURED}}
    metrics |= {"versions": versions(), "git_commit": git_commit()}
    if fell_back:
        metrics[FALLBACK] = "CIFAR-10 is not available: these are the results of the embedded handwritten digits"
    return metrics


def versions() -> dict[str, str | None]:
    """Returns the versions of the packages that a result depends on; None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "python": platform.python_version()}


def git_commit(folder: Path = REPOSITORY) -> str | None:
    """Returns the commit checked out in a folder, with -dirty if tracked files differ; None if git knows none."""
    if not (folder / ".git").exists():  # installed: an enclosing repository is another project's
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # git is not installed, or the repository has no commit yet
        return None


def write_json(file: Path, values: Mapping[str, Any] | list[Any]) -> None:
    """Writes a JSON file, whole or not at all; NaN and infinities, which JSON lacks, become null."""
    text = json.dumps(_finite(values), indent=2, allow_nan=False, ensure_ascii=False)
    atomic.staged(file).write_text(text + "\n")
    atomic.put_in_place(file)


def print_summary(metrics: Mapping[str, Any], run_dir: Path) -> None:
    """Prints the results of a run, of metrics.json, and where they are kept: <out>/<name>/version_N."""
    print_test_table(metrics)
    for name, value in summary_rows(metrics):
        print(f"{name:12}{value}")
    if FALLBACK in metrics:
        print(f"WARNING: {metrics[FALLBACK]}")
    print(f"run folder  {run_dir}")
    print(f"curves      {curves(run_dir.parent.parent)}")


def curves(folder: Path) -> str:
    """Returns how to look at the curves of all runs in a folder: TensorBoard's command, and its page to open."""
    command = f"{shlex.quote(next_to_python('tensorboard'))} --logdir {shlex.quote(str(folder))} --host localhost"
    return f"{command}  # then open http://localhost:6006/#custom_scalars"


def print_test_table(metrics: Mapping[str, Any]) -> None:
    """Prints test/* of metrics.json; nothing if there was no test. Each of up to 25 classes has a row, nan for one
    without images; the last one is their mean weighted by images, for the recall the accuracy."""
    if metrics.get("test/acc") is None:
        return
    table = Table("class", *(Column(name, justify="right") for name in ("accuracy (recall)", "precision", "F1")))
    classes = metrics["test/acc_per_class"]
    for name in classes if len(classes) <= MOST_ROWS else ():
        of_class = (metrics[f"test/{key}_per_class"][name] for key in ("acc", "precision", "f1"))
        table.add_row(escape(name), *(f"{share:.2%}" for share in of_class))
    table.add_section()
    table.add_row("all", *(f"{metrics[f'test/{key}']:.2%}" for key in ("acc", "precision_weighted", "f1_weighted")))
    Console(highlight=False).print(table)
    for name, title in SHOWN.items():
        value = metrics.get(f"test/{name}")  # a data set of few classes has no top-5 accuracy
        if value is not None:
            print(f"{title:24}{value:.4f}")


def summary_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (label, text) rows of the summary."""
    rows = [("trained", f"{metrics['model']} with {metrics['strategy']}, {metrics['precision']}")]
    if metrics["trained_parameters"] < metrics["parameters"]:
        rows.append(("parameters", f"{metrics['trained_parameters']:,} trained of {metrics['parameters']:,}"))
    ranks = "1 rank" if metrics["world_size"] == 1 else f"{metrics['world_size']} ranks"
    rows += [
        ("device", f"{ranks}, {metrics['device_name']}"),
        ("images", f"{metrics['dataset']}, {metrics['num_train']:,} to train, {metrics['num_test']:,} to test"),
        ("steps", f"{metrics['steps']:,} of {metrics['batch_size']} images, {metrics['epochs']:.3g} epochs"),
        ("time", f"{metrics['perf/fit_seconds']:.1f} s"),
    ]
    if metrics["train/loss"] is not None:
        rows.append(("loss", f"{metrics['train/loss']:.4f} in training, mean of the last interval"))
    if metrics["perf/images_per_second"] is not None:
        step_time, data_time = metrics["perf/step_time_ms"], metrics["perf/data_time_ms"]
        step = f"{step_time:.2f} ms per step, {data_time:.2f} ms of it waiting for data"
        rows.append(("speed", f"{metrics['perf/images_per_second']:,.0f} images/s, {step}"))
    if metrics["perf/tflops"] is not None:
        rows.append(("computation", f"{metrics['perf/tflops']:.3g} TFLOP/s"))
    if metrics["perf/mfu"] is not None:
        rows.append(("MFU", f"{metrics['perf/mfu']:.2%} of the devices' peak"))
    if metrics["mem/peak_rank_bytes"]:  # empty if a resumed run had no step left
        peak, states = max(metrics["mem/peak_rank_bytes"]), max(metrics["mem/model_state_rank_bytes"])
        rows.append(("memory", f"at most {peak / 1e9:.2f} GB per rank, {states / 1e6:,.2f} MB of it model states"))
    return rows


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
