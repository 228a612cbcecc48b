"""Collects the results of a run for metrics.json, and prints tables of them. Does not import torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cifar_zero.checkpoints import run_folder
from cifar_zero.config.run import Run
from cifar_zero.core.atomic import failure_of, write_json
from cifar_zero.core.console import curves
from cifar_zero.core.hardware import git_commit, versions

SCHEMA = 1  # version of metrics.json's keys; raised when a key changes its meaning

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
    *("compute_dtype", "parameter_dtype", "skipped_steps", "reduce_bucket_size", "allgather_bucket_size"),
)
"""Keys of metrics.json that a run fills in, in the order of the file. If the run does not have a value, the value is
null."""

FALLBACK = "fallback"
"""Key of metrics.json that exists only if the run fell back to the embedded digits because CIFAR-10 was not available.
Its value is a sentence that states this."""

SHOWN = {
    "precision": "macro precision",
    "recall": "macro recall",
    "f1": "macro F1",
    "acc_top5": "top-5 accuracy",
    "auroc": "macro AUROC",
    "average_precision": "macro average precision",
    "calibration_error": "calibration error",
}
"""Metrics of a test that are printed below the test table, with the titles under which they are printed."""

MOST_ROWS = 25  # the most classes for which a test table has rows; metrics.json has all classes


def collect(trainer: Any, module: Any, datamodule: Any, run: Run) -> dict[str, Any]:
    """Returns the content of metrics.json after fit and test, with the keys of MEASURED in the order of the file.
    Values that the run does not have, for example without a test, are None. The `totals_of_run` of the callbacks are
    included. Every rank must call it."""
    metrics = {"schema": SCHEMA, **dict.fromkeys(MEASURED), "versions": versions(), "git_commit": git_commit()}
    metrics |= {
        "dataset": datamodule.dataset.name,
        "num_train": datamodule.num_train,
        "num_test": datamodule.num_test,
        "model": run.recipe.model.name,
        "strategy": run.placement.strategy_name,
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "precision": run.placement.precision,
        "seed": run.recipe.seed,
        "batch_size": run.recipe.batch_size,
        "accumulate": run.placement.accumulate,
        "micro_batch_size": run.micro_batch,
        "steps": trainer.global_step,
        **test_metrics(module, datamodule),
    }
    for callback in trainer.callbacks:
        metrics |= getattr(callback, "totals_of_run", {})
    if run.fell_back:
        metrics[FALLBACK] = "CIFAR-10 is not available: these are the results of the embedded handwritten digits"
    return metrics


def test_metrics(module: Any, datamodule: Any) -> dict[str, Any]:
    """Returns the test/* metrics of metrics.json. If no image was tested, returns an empty dictionary. Every rank must
    call it."""
    tested = module.test_metrics
    if not tested.confusion.update_called:
        return {}
    metrics: dict[str, Any] = {f"test/{name}": value for name, value in tested.overall().items()}
    for name, values in tested.per_class().items():
        metrics[f"test/{name}_per_class"] = dict(zip(datamodule.classes, values.tolist(), strict=True))
    return metrics


def report(metrics: Mapping[str, Any], run_dir: Path) -> str:
    """Writes metrics.json and prints the summary. Returns why the file could not be written, or an empty string."""
    file = run_dir / run_folder.METRICS
    failure = failure_of(lambda: write_json(file, metrics))
    print_summary(metrics, run_dir)
    if failure:
        return f"{file} could not be written: {failure}"
    return ""


def print_summary(metrics: Mapping[str, Any], run_dir: Path) -> None:
    """Prints the results of a run, from the content of its metrics.json, and the path of its run folder."""
    print_test_table(metrics)
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
        rows.append(("computation", f"{metrics['perf/tflops']:.3g} TFLOP/s"))
    if metrics["perf/mfu"] is not None:
        rows.append(("MFU", f"{metrics['perf/mfu']:.2%} of the devices' peak"))
    if metrics["mem/peak_rank_bytes"]:  # empty if a resumed run had no step left
        peak, states = max(metrics["mem/peak_rank_bytes"]), max(metrics["mem/model_state_rank_bytes"])
        rows.append(("memory", f"at most {peak / 1e9:.2f} GB per rank, {states / 1e6:,.2f} MB of it model states"))
    for name, value in rows:
        print(f"{name:12}{value}")
    if FALLBACK in metrics:
        print(f"WARNING: {metrics[FALLBACK]}")
    print(f"run folder  {run_dir}")
    print(f"curves      {curves(run_dir.parent.parent)}")


def print_test_table(metrics: Mapping[str, Any]) -> None:
    """Prints a table of accuracy, precision and F1 from the test/* metrics, and the metrics in SHOWN below it. Prints
    nothing if there was no test.

    With at most MOST_ROWS classes, each class has a row, with nan for a class without images. The last row has means
    over the classes, weighted by their numbers of images. The weighted mean of the recall is the accuracy.
    """
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
