"""The figures of a test: confusion matrix, most confident mistakes, ROC and precision-recall curves."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from torch import Tensor

from cifar_zero.checkpoints.io import attempt
from cifar_zero.config.recipe import Inputs
from cifar_zero.launch.collectives import gather
from cifar_zero.reports.figures import (
    MISTAKE_COLUMNS,
    MISTAKE_ROWS,
    confusion_figure,
    curve_figure,
    mistakes_figure,
)
from cifar_zero.strategies import hooks_of
from cifar_zero.training.loggers import write_to

SHOWN = MISTAKE_ROWS * MISTAKE_COLUMNS  # mistakes that the figure has room for, and that are kept

Mistakes = tuple[Tensor, Tensor, Tensor, Tensor]
"""Confidence (n,), images (n, 3, H, W), true labels (n,) and predicted labels (n,), the most confident first."""


class TestFigures(Callback):
    """Writes the figures of a test into the run folder and the loggers."""

    _mistakes: Mistakes | None = None

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._mistakes = None

    def on_test_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        """Keeps the most confident mistakes so far, on the device; `outputs`: class scores (N, classes)."""
        found = surest_mistakes(outputs, *batch)
        self._mistakes = found if self._mistakes is None else merge([self._mistakes, found])

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        assert self._mistakes is not None
        of_each_rank = gather(tuple(part.cpu() for part in self._mistakes), hooks_of(trainer.strategy).data_group())
        tested = pl_module.test_metrics  # every rank calls it: it adds up the ranks' counts
        counts, per_class = tested.confusion.compute().cpu().numpy(), tested.per_class()
        false_alarms, hits, _ = tested.roc.compute()
        precisions, recalls, _ = tested.precision_recall.compute()
        if not trainer.is_global_zero:
            return
        names = trainer.datamodule.classes  # pyright: ignore[reportAttributeAccessIssue]
        confidence, images, true, predicted = merge(of_each_rank)  # pyright: ignore[reportArgumentType]
        mistakes = as_pixels(images, pl_module.inputs).numpy(), true.numpy(), predicted.numpy(), confidence.numpy()
        roc, precision_recall = [*zip(false_alarms, hits, strict=True)], [*zip(recalls, precisions, strict=True)]
        rates = ["false positive rate", "true positive rate"]
        averages = per_class["average_precision"]
        _write(trainer, confusion_figure(counts, names), "confusion_matrix")
        _write(trainer, mistakes_figure(*mistakes, names), "mistakes")
        _write(trainer, curve_figure(roc, per_class["auroc"], names, "AUROC", rates), "roc")
        figure = curve_figure(precision_recall, averages, names, "average precision", ["recall", "precision"])
        _write(trainer, figure, "precision_recall")


def surest_mistakes(scores: Tensor, images: Tensor, labels: Tensor) -> Mistakes:
    """Returns the wrongly classified images (N, 3, H, W) of a batch that a figure would show. Scores (N, classes) are
    before the softmax; labels (N,) are negative for padding."""
    confidence, predicted = scores.float().softmax(dim=1).max(dim=1)
    wrong = (predicted != labels) & (labels >= 0)
    return merge([(confidence[wrong], images[wrong], labels[wrong], predicted[wrong])])


def merge(found: list[Mistakes]) -> Mistakes:
    """Returns the most confident mistakes of several lots."""
    confidence, images, true, predicted = (torch.cat(parts) for parts in zip(*found, strict=True))
    surest = confidence.argsort(descending=True, stable=True)[:SHOWN]
    return confidence[surest], images[surest], true[surest], predicted[surest]


def as_pixels(images: Tensor, inputs: Inputs) -> Tensor:
    """Returns uint8 pixels of images (n, 3, H, W) that may be normalised."""
    if not images.is_floating_point():
        return images
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (inputs.mean, inputs.std))
    return (255 * (images.float() * std + mean)).round().clamp(0, 255).to(torch.uint8)


def _write(trainer: Trainer, figure: Figure, name: str) -> None:
    """Saves <name>.png in the run folder, and adds it to the loggers that can show images as figures/<name>."""
    file, tag = Path(trainer.default_root_dir) / f"{name}.png", f"figures/{name}"
    if not attempt(lambda: figure.savefig(file, dpi=120), file):
        return
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            write_to(logger, partial(logger.experiment.add_figure, tag, figure, trainer.global_step))
        elif isinstance(logger, WandbLogger):
            write_to(logger, partial(logger.log_image, tag, [str(file)], trainer.global_step))
