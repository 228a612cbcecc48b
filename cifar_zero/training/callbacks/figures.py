"""Draws the figures of a test: confusion matrix, ROC and precision-recall curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.utilities.plot import plot_confusion_matrix, plot_curve

from cifar_zero.core.atomic import attempt
from cifar_zero.training.loggers import write_to

LABELLED_CLASSES = 30  # largest number of classes whose names and counts are legible in a figure


class TestFigures(Callback):
    """Writes the figures of a test into the run folder and to the loggers."""

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        tested = pl_module.test_metrics  # every rank must call compute, which sums over ranks
        counts, per_class = tested.confusion.compute().cpu(), tested.per_class()
        false_alarms, hits, _ = tested.roc.compute()
        precisions, recalls, _ = tested.precision_recall.compute()
        if not trainer.is_global_zero:
            return
        names = trainer.datamodule.classes  # pyright: ignore[reportAttributeAccessIssue]
        _write(trainer, confusion_figure(counts, names), "confusion_matrix")
        axes = "false positive rate", "true positive rate"
        _write(trainer, curve_figure((false_alarms, hits), per_class["auroc"], names, "AUROC", axes), "roc")
        curves, areas = (recalls, precisions), per_class["average_precision"]
        figure = curve_figure(curves, areas, names, "average precision", ("recall", "precision"))
        _write(trainer, figure, "precision_recall")


def _write(trainer: Trainer, figure: Figure, name: str) -> None:
    file, tag = Path(trainer.default_root_dir) / f"{name}.png", f"figures/{name}"
    if not attempt(lambda: figure.savefig(file, dpi=120), file):
        return
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            write_to(logger, logger.experiment.add_figure, tag, figure, trainer.global_step)
        elif isinstance(logger, WandbLogger):
            write_to(logger, logger.log_image, tag, [str(file)], trainer.global_step)


def confusion_figure(counts: Tensor, class_names: Sequence[str]) -> Figure:
    """Draws the confusion matrix `counts` (classes, classes), with true classes in rows and predicted classes in
    columns."""
    figure = Figure(figsize=(10, 9), layout="constrained")
    axes = figure.add_subplot()
    named = len(class_names) <= LABELLED_CLASSES
    plot_confusion_matrix(counts, axes, add_text=named, labels=[*class_names], cmap="Blues")
    if not named:
        axes.set(xticks=[], yticks=[])
    axes.set_title(f"{counts.sum():,} test images, {counts.trace() / counts.sum():.2%} correct")
    return figure


def curve_figure(curves: Any, areas: Tensor, class_names: Sequence[str], title: str, axes: tuple[str, str]) -> Figure:
    """Draws the curve of each class against the rest (one-vs-rest), such as the ROC curve.

    Args:
        curves: The x-coordinates of all curves and their y-coordinates, from 0 to 1.
        areas: Area under each curve for the legend, (classes,), NaN for a class without images.
        title: What an area is called, such as AUROC. The title of the figure is this name with the mean of the areas.
        axes: Names of the x-axis and the y-axis.
    """
    figure = Figure(figsize=(7.6, 4.8), layout="constrained")
    plot = figure.add_subplot()
    plot_curve(curves, areas, plot, axes, labels=[*class_names])
    plot.set_title(f"{title} {areas.nanmean():.4f}, mean over the classes")
    if len(class_names) > LABELLED_CLASSES:
        plot.legend().remove()
    return figure
