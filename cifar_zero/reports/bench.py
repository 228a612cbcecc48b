"""The table at the end of a run with --bench_steps."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def is_benchmark(metrics: Mapping[str, Any]) -> bool:
    """Whether a run was made with --bench_steps, which alone times each step by itself."""
    return metrics["perf/step_time_median_ms"] is not None


def print_bench_table(metrics: Mapping[str, Any], console: Console) -> None:
    """Prints what a benchmark measured; nothing for another run.

    Args:
        metrics: of metrics.json.
        console: where to.
    """
    if not is_benchmark(metrics):
        return
    table = Table("measured", "")
    table.columns[1].justify = "right"
    for name, value in _rows(metrics):
        table.add_row(name, value)
    console.print(table)


def _rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    spread = " / ".join(f"{metrics[f'perf/step_time_{name}_ms']:.2f}" for name in ("min", "median", "max"))
    rows = [
        ("images per second", f"{metrics['perf/images_per_second']:,.1f}"),
        ("step time, mean (ms)", f"{metrics['perf/step_time_ms']:.2f}"),
        ("shortest / median / longest (ms)", spread),
        ("of the mean, waiting for data (ms)", f"{metrics['perf/data_time_ms']:.2f}"),
        ("TFLOP/s", f"{metrics['perf/tflops']:.4g}"),
    ]
    if metrics["perf/mfu"] is not None:
        rows.append(("of the devices' peak (MFU)", f"{metrics['perf/mfu']:.2%}"))
    rows.append(("start to first step (s)", f"{metrics['perf/seconds_to_first_step']:.1f}"))
    peaks, states = metrics["mem/peak_rank_bytes"], metrics["mem/model_state_rank_bytes"]
    rows.append(("peak memory of each rank (GB)", ", ".join(f"{peak / 1e9:.2f}" for peak in peaks)))
    rows.append(("model states of each rank (MB)", ", ".join(f"{state / 1e6:,.2f}" for state in states)))
    return rows
