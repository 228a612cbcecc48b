"""Computes the losses that --loss selects, and the metrics of a split (validation or test) over all ranks, from counts
that torchmetrics keeps. docs/runs.md has a table of the metrics, with their values for a class without images."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torchmetrics import Metric, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassPrecisionRecallCurve,
    MulticlassROC,
)

from cifar_zero.config.recipe import LossName
from cifar_zero.data.dataset import IGNORED

TOP = 5
"""The k of the top-5 accuracy, as in ImageNet's challenge (Russakovsky et al. 2015, https://arxiv.org/abs/1409.0575).
With at most five classes the accuracy would always be 1, so it is left out."""

OPTIONS: dict[str, Any] = {"ignore_index": IGNORED, "validate_args": False}
"""Options of torchmetrics' classes. Their check of arguments would wait for the device in each batch."""

BINS = 15  # number of confidence bins, from Guo et al. 2017, https://arxiv.org/abs/1706.04599, table 1


def loss(
    name: LossName,
    scores: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    """Returns the mean loss of a batch as a scalar, or the loss of each image (N,) if `reduction` is none.

    mse and bce are summed over the classes. mse is the squared difference between the scores and the targets, which are
    1 for the class of an image and 0 for the other classes (Hui and Belkin 2021, "Evaluation of Neural Architectures
    Trained with Square Loss"). bce treats a score as the log odds of its class.

    Args:
        scores: Class scores before the softmax, float32 (N, classes).
        labels: Classes, int64 (N,), or the share of each class in each image, float32 (N, classes). An image with the
            label IGNORED has the loss 0, and the mean leaves it out.
        label_smoothing: Share of each label that is spread evenly over all classes.
    """
    if name == "cross_entropy":
        return F.cross_entropy(
            scores, labels, label_smoothing=label_smoothing, reduction=reduction, ignore_index=IGNORED
        )
    soft = labels.is_floating_point()
    shares = labels if soft else F.one_hot(labels.clamp(min=0), scores.shape[1]).to(scores.dtype)
    shares = shares * (1 - label_smoothing) + label_smoothing / scores.shape[1]
    each = F.binary_cross_entropy_with_logits
    if name == "mse":
        each = F.mse_loss
    of_images = each(scores, shares, reduction="none").sum(dim=1)
    if soft:
        return of_images.mean() if reduction == "mean" else of_images
    counted = labels != IGNORED
    of_images = of_images.masked_fill(~counted, 0)
    return of_images.sum() / counted.sum() if reduction == "mean" else of_images


class SplitMetrics:
    """Computes the metrics of one pass through a split, over the images of all ranks: loss, accuracy (with more than 5
    classes also top-5), precision, recall, F1, calibration error and confusion matrix.

    Counts are int64 and the loss is summed in float32, whatever the precision of the run. Images with the label IGNORED
    do not count. This class is not an nn.Module, because DeepSpeed would visit its instances several times per step.

    `curves` adds the exact ROC and precision-recall curves of each class against the rest (one-vs-rest). At the end,
    every rank gathers the probabilities of all images, which take 8 bytes x images x classes (8 MB for CIFAR-100). They
    are float64, because in float32 the probabilities of a confident model would round to 1 and tie.
    """

    def __init__(self, num_classes: int, loss: LossName = "cross_entropy", curves: bool = False):
        self.num_classes = num_classes
        self.loss: LossName = loss
        # SumMetric keeps a NaN. torchmetrics' MeanMetric (1.9.0) drops it, or with nan_strategy="disable" its weights.
        self.loss_sum = SumMetric(nan_strategy="disable")
        # `confusion.update_called` is True if anything was counted since the last `reset`.
        self.confusion = MulticlassConfusionMatrix(num_classes, **OPTIONS)
        self.shares: dict[str, Metric] = {
            "calibration_error": MulticlassCalibrationError(num_classes, n_bins=BINS, **OPTIONS)
        }
        if num_classes > TOP:
            self.shares[f"acc_top{TOP}"] = MulticlassAccuracy(num_classes, top_k=TOP, average="micro", **OPTIONS)
        self.curves: tuple[Metric, ...] = ()
        if curves:
            self.roc = MulticlassROC(num_classes, **OPTIONS)
            self.precision_recall = MulticlassPrecisionRecallCurve(num_classes, **OPTIONS)
            self.curves = (self.roc, self.precision_recall)

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Adds a batch to the counts. Scores (N, classes) are float32, before the softmax. Labels are int64 (N,),
        IGNORED for images that do not count."""
        self.loss_sum.update(loss(self.loss, scores, labels, reduction="none"))
        probabilities = scores.double().softmax(dim=1)
        for metric in (self.confusion, *self.shares.values(), *self.curves):
            metric.update(probabilities, labels)

    def per_class(self) -> dict[str, Tensor]:
        """Returns metrics by name, each with one value per class, float64 (classes,) on the CPU. With `curves`, the
        area under the ROC curve (auroc) and the average precision are included. Every rank must call it.

        A class without images has NaN. The auroc is also NaN if no other class has images. The precision of a class
        that was never predicted is 0, as in scikit-learn.
        """
        counts = self.confusion.compute().cpu().double()  # true class by predicted class
        right, images, predicted = counts.diagonal(), counts.sum(dim=1), counts.sum(dim=0)
        absent = images == 0
        precision = (right / predicted.clamp(min=1)).masked_fill(absent, torch.nan)
        f1 = (2 * right / (images + predicted)).masked_fill(absent, torch.nan)
        metrics = {"acc": right / images, "precision": precision, "recall": right / images, "f1": f1}
        if self.curves:
            is_alone = absent.sum() == self.num_classes - 1  # no other class has images
            # Computed here, because torchmetrics' MulticlassAUROC and MulticlassAveragePrecision sort the scores again.
            false_alarms, hits, _ = self.roc.compute()
            areas = torch.stack([torch.trapezoid(y, x) for x, y in zip(false_alarms, hits, strict=True)])
            precisions, recalls, _ = self.precision_recall.compute()
            sums = torch.stack([-x.diff() @ y[:-1] for x, y in zip(recalls, precisions, strict=True)])
            metrics["auroc"] = areas.cpu().double().masked_fill(absent | is_alone, torch.nan)
            metrics["average_precision"] = sums.cpu().double().masked_fill(absent, torch.nan)
        return metrics

    def overall(self) -> dict[str, float]:
        """Returns the metrics of the full split by name. Every rank must call it.

        acc is the accuracy over all images. The other metrics of `per_class` become macro averages, which are means
        over the classes with images. In the *_weighted metrics, each class is weighted by its number of images. A
        weighted recall would equal the accuracy.
        """
        per_class = self.per_class()
        counts = self.confusion.compute().cpu().double()
        images = counts.sum()
        shares = counts.sum(dim=1) / images
        metrics = {name: values.nanmean().item() for name, values in per_class.items()}
        metrics |= {
            "loss": (self.loss_sum.compute().cpu() / images).item(),
            "acc": (counts.trace() / images).item(),
            "precision_weighted": (per_class["precision"] * shares).nansum().item(),
            "f1_weighted": (per_class["f1"] * shares).nansum().item(),
        }
        for name, metric in self.shares.items():
            metrics[name] = metric.compute().item()
        return metrics

    def named(self, split: str, class_names: tuple[str, ...]) -> dict[str, float]:
        """Returns the values to log, keyed by the tag of their curve. The metrics of `overall` have the tag
        <split>/<metric>, with the split val or test. For each class with images, acc and, with at most 30 classes,
        precision and f1 have the tag <split>/<metric>_class/<name>. Every rank must call it."""
        per_class = self.per_class()
        curves = ["acc"]  # metrics with a curve for each class
        if self.num_classes <= 30:
            curves += ["precision", "f1"]
        logged = {f"{split}/{metric}": value for metric, value in self.overall().items()}
        for metric in curves:
            for name, value in zip(class_names, per_class[metric].tolist(), strict=True):
                if math.isfinite(value):
                    logged[f"{split}/{metric}_class/{name}"] = value
        return logged

    def reset(self, device: torch.device, group: ProcessGroup | None = None) -> None:
        """Sets all counts to 0 and moves them to `device`, the device of the scores and labels. They will be summed
        over the ranks of `group`, by default all ranks, which together must see each image once."""
        for metric in (self.loss_sum, self.confusion, *self.shares.values(), *self.curves):
            metric.process_group = group
            metric.to(device).reset()
