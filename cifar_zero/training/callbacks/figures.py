"""Draws the figures of a test: confusion matrix, most confident mistakes, ROC and precision-recall curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.utilities.plot import plot_confusion_matrix, plot_curve

from cifar_zero.config.recipe import Inputs
from cifar_zero.core.atomic import attempt
from cifar_zero.launch.collectives import gather
from cifar_zero.strategies import hooks_of
from cifar_zero.training.loggers import write_to

MISTAKE_ROWS, MISTAKE_COLUMNS = 4, 6  # rows and columns of the grid of mistakes

LABELLED_CLASSES = 30  # largest number of classes whose names and counts are legible in a figure

SHOWN = MISTAKE_ROWS * MISTAKE_COLUMNS  # number of mistakes that the figure shows and the callback keeps

Mistakes = tuple[Tensor, Tensor, Tensor, Tensor]
"""Describes n wrongly classified images, the most confident first, by four tensors: confidence (n,), images (n, 3, H,
W), true labels (n,) and predicted labels (n,)."""


class TestFigures(Callback):
    """Writes the figures of a test into the run folder and to the loggers."""

    _mistakes: Sequence[Mistakes] = ()  # empty, or one item with the mistakes of all batches so far

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._mistakes = ()

    def on_test_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        """Keeps the most confident mistakes so far on the device. `outputs` are class scores (N, classes)."""
        self._mistakes = [merge([*self._mistakes, surest_mistakes(outputs, *batch)])]

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        own = tuple(part.cpu() for part in self._mistakes[0])
        of_each_rank = gather(own, hooks_of(trainer.strategy).data_group())
        tested = pl_module.test_metrics  # every rank must call compute, which sums over ranks
        counts, per_class = tested.confusion.compute().cpu(), tested.per_class()
        false_alarms, hits, _ = tested.roc.compute()
        precisions, recalls, _ = tested.precision_recall.compute()
        if not trainer.is_global_zero:
            return
        names = trainer.datamodule.classes  # pyright: ignore[reportAttributeAccessIssue]
        confidence, images, true, predicted = merge(of_each_rank)  # pyright: ignore[reportArgumentType]
        mistakes = as_pixels(images, pl_module.inputs).numpy(), true.numpy(), predicted.numpy(), confidence.numpy()
        _write(trainer, confusion_figure(counts, names), "confusion_matrix")
        _write(trainer, mistakes_figure(*mistakes, names), "mistakes")
        axes = "false positive rate", "true positive rate"
        _write(trainer, curve_figure((false_alarms, hits), per_class["auroc"], names, "AUROC", axes), "roc")
        curves, areas = (recalls, precisions), per_class["average_precision"]
        figure = curve_figure(curves, areas, names, "average precision", ("recall", "precision"))
        _write(trainer, figure, "precision_recall")


def surest_mistakes(scores: Tensor, images: Tensor, labels: Tensor) -> Mistakes:
    """Returns the most confident mistakes in a batch, at most as many as a figure shows.

    Args:
        scores: Class scores before the softmax, (N, classes).
        images: The images, (N, 3, H, W).
        labels: The true labels, (N,), negative for padding.
    """
    confidence, predicted = scores.float().softmax(dim=1).max(dim=1)
    wrong = (predicted != labels) & (labels >= 0)
    return merge([(confidence[wrong], images[wrong], labels[wrong], predicted[wrong])])


def merge(groups: list[Mistakes]) -> Mistakes:
    """Merges several groups of mistakes, and returns the most confident mistakes among them, at most as many as a
    figure shows."""
    confidence, images, true, predicted = (torch.cat(parts) for parts in zip(*groups, strict=True))
    surest = confidence.argsort(descending=True, stable=True)[:SHOWN]
    return confidence[surest], images[surest], true[surest], predicted[surest]


def as_pixels(images: Tensor, inputs: Inputs) -> Tensor:
    """Returns images (n, 3, H, W) as uint8 pixels. Floating-point images are denormalised with the mean and standard
    deviation in `inputs`."""
    if not images.is_floating_point():
        return images
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (inputs.mean, inputs.std))
    return (255 * (images.float() * std + mean)).round().clamp(0, 255).to(torch.uint8)


def _write(trainer: Trainer, figure: Figure, name: str) -> None:
    """Saves a figure as <name>.png in the run folder, and adds it as figures/<name> to the loggers that can show
    images."""
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


def mistakes_figure(
    images: NDArray[np.uint8],
    true: NDArray[np.int64],
    predicted: NDArray[np.int64],
    confidence: NDArray[np.float32],
    class_names: Sequence[str],
) -> Figure:
    """Draws a grid of wrongly classified RGB images (N, 3, H, W), in the order given. At most the first 24 are shown.
    The true labels, predicted labels and confidences have the shape (N,). A confidence is the probability of the
    predicted class."""
    figure = Figure(figsize=(1.75 * MISTAKE_COLUMNS, 2.1 * MISTAKE_ROWS + 0.4), layout="constrained")
    figure.suptitle("most confident mistakes: true → predicted" if len(images) else "no mistakes")
    cells = list(figure.subplots(MISTAKE_ROWS, MISTAKE_COLUMNS).flat)
    for axes in cells:
        axes.set_axis_off()
    for axes, image, label, guess, share in zip(cells, images, true, predicted, confidence, strict=False):
        axes.imshow(image.transpose(1, 2, 0), interpolation="nearest")
        # Rounded down, because 100 % would claim a certainty that a softmax does not have.
        percent = min(int(100 * np.nan_to_num(share)), 99)
        axes.set_title(f"{class_names[label]} →\n{class_names[guess]} {percent} %", fontsize=9)
    return figure


def curve_figure(curves: Any, areas: Tensor, class_names: Sequence[str], title: str, axes: tuple[str, str]) -> Figure:
    """Draws the curve of each class against the rest (one-vs-rest), such as the ROC curve.

    Args:
        curves: The x-coordinates of all curves and their y-coordinates, from 0 to 1.
        areas: Area under each curve for the legend, (classes,), NaN for a class without images.
        class_names: Names of the classes for the legend.
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
