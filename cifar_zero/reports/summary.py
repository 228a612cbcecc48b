"""The end of a run: metrics.json, and what is printed of it."""

import json
import math
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cifar_zero.reports.bench import is_benchmark, print_bench_table

SCHEMA = 1
"""Of metrics.json; goes up when a key changes its meaning."""

REPOSITORY = Path(__file__).parents[2]

MEASURED = (
    *("dataset", "num_train", "num_test", "model", "parameters", "trained_parameters"),
    *("strategy", "world_size", "num_nodes"),
    *("accelerator", "device_name", "precision", "seed", "batch_size", "micro_batch_size", "accumulate"),
    *("epochs", "steps", "train/loss", "val/acc", "test/loss", "test/acc", "test/acc_per_class"),
    *("test/acc_top5", "test/precision", "test/recall", "test/f1", "test/precision_weighted", "test/f1_weighted"),
    *("test/auroc", "test/average_precision", "test/calibration_error", "test/precision_per_class"),
    *("test/recall_per_class", "test/f1_per_class", "test/auroc_per_class", "test/average_precision_per_class"),
    *("perf/images_per_second", "perf/step_time_ms", "perf/step_time_min_ms", "perf/step_time_median_ms"),
    *("perf/step_time_max_ms", "perf/data_time_ms", "perf/tflops", "perf/mfu", "perf/seconds_to_first_step"),
    *("perf/fit_seconds",),
    *("mem/peak_rank_bytes", "mem/model_state_rank_bytes"),
    *("mem/parameter_rank_bytes", "mem/gradient_rank_bytes", "mem/optimizer_rank_bytes"),
    *("compute_dtype", "parameter_dtype", "skipped_steps", "reduce_bucket_size", "allgather_bucket_size"),
)
"""Keys of metrics.json that a run fills in, in their order; null where the run had none (a run without a test)."""

FALLBACK = "fallback"
"""Key of metrics.json that is only there when the data is not what was asked for: one line that says so."""

PACKAGES = ("torch", "lightning", "deepspeed", "torchmetrics")

TABLE_ROWS = 25
"""Most rows of the table of classes; more classes go beside one another, where the terminal is wide enough."""


def metrics_json(measured: Mapping[str, Any], fallback: str = "") -> dict[str, Any]:
    """The contents of metrics.json, its keys in their order.

    Args:
        measured: a value for each key of MEASURED and for no other.
        fallback: one line, where the data is not what was asked for.
    """
    if set(measured) != set(MEASURED):
        raise ValueError(f"metrics.json: missing or unknown keys {sorted(set(measured) ^ set(MEASURED))}")
    return {
        "schema": SCHEMA,
        **{key: measured[key] for key in MEASURED},
        "versions": versions(),
        "git_commit": git_commit(),
        **({FALLBACK: fallback} if fallback else {}),
    }


def versions() -> dict[str, str | None]:
    """Versions of the packages that a result depends on; None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
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


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file, whole or not at all; NaN and infinities, which JSON lacks, become null."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(_finite(values), indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    os.replace(temporary, file)


def print_summary(metrics: Mapping[str, Any], run_dir: Path, console: Console | None = None) -> None:
    """Prints what a run came to and where it is kept.

    Args:
        metrics: of metrics.json.
        run_dir: the run folder, <out>/<name>/version_N.
        console: where to; the standard output by default.
    """
    console = console or Console(highlight=False)
    print_test_table(metrics, console)
    print_bench_table(metrics, console)
    table = Table.grid(padding=(0, 2))
    for name, value in _summary_lines(metrics):
        table.add_row(f"[dim]{name}", escape(value))
    console.print(table)
    if FALLBACK in metrics:
        console.print(f"WARNING: {escape(metrics[FALLBACK])}", style="bold white on red", soft_wrap=True)
    out = shlex.quote(str(run_dir.parent.parent))
    console.print(f"[dim]run folder  [/]{escape(str(run_dir))}", soft_wrap=True)
    console.print(f"[dim]curves      [/]tensorboard --logdir {escape(out)} --host localhost", soft_wrap=True)


def print_test_table(metrics: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the figures of a test, of each class and of all; nothing where there was no test.

    Args:
        metrics: test/* of metrics.json; NaN where a figure is not defined.
        console: where to; the standard output by default.
    """
    console = console or Console(highlight=False)
    if metrics.get("test/acc") is None:
        return
    few = len(metrics["test/acc_per_class"]) <= TABLE_ROWS
    accuracies = metrics["test/acc_per_class"]
    console.print(_class_table(metrics) if few else _accuracy_table(accuracies, metrics["test/acc"], console.width))
    grid = Table.grid(padding=(0, 2))
    precision, recall, f1 = (_percent(metrics[f"test/{name}"]) for name in ("precision", "recall", "f1"))
    grid.add_row("[dim]macro mean", f"precision {precision}, recall {recall}, F1 {f1}")
    if metrics["test/acc_top5"] is not None:
        grid.add_row("[dim]top-5", f"{_percent(metrics['test/acc_top5'])} accuracy")
    areas = f"{metrics['test/auroc']:.4f}, average precision {metrics['test/average_precision']:.4f}, macro means"
    grid.add_row("[dim]AUROC", areas)
    grid.add_row("[dim]calibration", f"{_percent(metrics['test/calibration_error'])} error (ECE)")
    console.print(grid)


def _class_table(metrics: Mapping[str, Any]) -> Table:
    """A row for each class, and their mean weighed with their images, which makes the accuracy of the recall."""
    table = Table("class", *(Column(name, justify="right") for name in ("accuracy (recall)", "precision", "F1")))
    classes = list(metrics["test/acc_per_class"])
    for name in classes:
        figures = (metrics[f"test/{figure}_per_class"][name] for figure in ("acc", "precision", "f1"))
        table.add_row(escape(name), *map(_percent, figures), end_section=name == classes[-1])
    of_all = (metrics[f"test/{figure}"] for figure in ("acc", "precision_weighted", "f1_weighted"))
    table.add_row("[bold]all", *(f"[bold]{_percent(value)}" for value in of_all))
    return table


def _accuracy_table(accuracies: Mapping[str, float], overall: float, width: int) -> Table:
    """Many classes beside one another, with their accuracy alone, in a table of at most `width` characters."""
    classes = list(accuracies.items())
    pair = max(map(len, accuracies)) + len("accuracy") + 2 * len(" │ ")
    columns = max(1, min(math.ceil(len(classes) / TABLE_ROWS), (width - 1) // pair))
    rows = math.ceil(len(classes) / columns)
    table = Table()
    for _ in range(columns):
        table.add_column("class")
        table.add_column("accuracy", justify="right")
    for row in range(rows):
        cells = [(escape(name), _percent(accuracy)) for name, accuracy in classes[row::rows]]
        table.add_row(*(text for cell in cells for text in cell), end_section=row == rows - 1)
    table.add_row("[bold]all", f"[bold]{_percent(overall)}")
    return table


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.2%}"


def _summary_lines(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    ranks = "1 rank" if metrics["world_size"] == 1 else f"{metrics['world_size']} ranks"
    lines = [
        ("trained", f"{metrics['model']} with {metrics['strategy']}, {metrics['precision']}"),
        ("device", f"{ranks}, {metrics['device_name']}"),
        ("images", f"{metrics['dataset']}, {metrics['num_train']:,} to train, {metrics['num_test']:,} to test"),
        ("steps", f"{metrics['steps']:,} of {metrics['batch_size']} images, {metrics['epochs']:.3g} epochs"),
        ("time", f"{metrics['perf/fit_seconds']:.1f} s"),
    ]
    if metrics["trained_parameters"] < metrics["parameters"]:
        lines.insert(1, ("parameters", f"{metrics['trained_parameters']:,} trained of {metrics['parameters']:,}"))
    if metrics["train/loss"] is not None:
        lines.append(("loss", f"{metrics['train/loss']:.4f} in training, mean of the last interval"))
    if is_benchmark(metrics):  # its table has the rest
        return lines
    if metrics["perf/images_per_second"] is not None:
        step_time, data_time = metrics["perf/step_time_ms"], metrics["perf/data_time_ms"]
        step = f"{step_time:.2f} ms a step, {data_time:.2f} ms of it waiting for data"
        lines.append(("speed", f"{metrics['perf/images_per_second']:,.0f} images/s, {step}"))
    if metrics["mem/peak_rank_bytes"]:  # empty where a resumed run had nothing left to do
        peak, states = max(metrics["mem/peak_rank_bytes"]), max(metrics["mem/model_state_rank_bytes"])
        lines.append(("memory", f"{peak / 1e9:.2f} GB a rank at most, {states / 1e6:,.2f} MB of it model states"))
    return lines


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
