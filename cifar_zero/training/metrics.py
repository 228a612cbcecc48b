"""The losses of --loss, and the metrics of a split over all ranks, derived from counts by torchmetrics.

docs/outputs.md says which follow from the confusion matrix, and what they are for a class without images.
"""

import math
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torchmetrics import Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassPrecisionRecallCurve, MulticlassROC

from cifar_zero.config.recipe import LossName
from cifar_zero.data.dataset import IGNORED
from cifar_zero.reports.figures import Curve

TOP = 5
"""The k of the top-5 accuracy, as in ImageNet's challenge (Russakovsky et al. 2015, https://arxiv.org/abs/1409.0575).
With at most five classes it would be 1, and is left out."""

OPTIONS: dict[str, Any] = {"ignore_index": IGNORED, "validate_args": False}
"""Of torchmetrics' classes, whose check of arguments would wait for the device in each batch."""

BINS = 15  # bins of confidence, as many as in Guo et al. 2017, https://arxiv.org/abs/1706.04599, table 1


def loss(
    name: LossName,
    scores: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    """Returns the mean loss of a batch, a scalar; with reduction none the loss of each image (N,).

    mse compares the scores, float32 (N, classes), with 1 for the class and 0 for the others (Hui and Belkin 2021,
    "Evaluation of Neural Architectures Trained with Square Loss"); bce takes a score as the log odds of its class. Both
    are summed over the classes. Labels are int64 (N,), of which IGNORED ones count 0 in an unreduced loss, or the share
    of each class (N, classes). `label_smoothing` is the share of a label that is spread evenly over all classes.
    """
    if name == "cross_entropy":
        return F.cross_entropy(
            scores, labels, label_smoothing=label_smoothing, reduction=reduction, ignore_index=IGNORED
        )
    soft = labels.is_floating_point()
    shares = labels if soft else F.one_hot(labels.clamp(min=0), scores.shape[1]).to(scores.dtype)
    shares = shares * (1 - label_smoothing) + label_smoothing / scores.shape[1]
    each = F.mse_loss if name == "mse" else F.binary_cross_entropy_with_logits
    of_images = each(scores, shares, reduction="none").sum(dim=1)
    if not soft:
        of_images = of_images.masked_fill(labels == IGNORED, 0)
    return of_images.mean() if reduction == "mean" else of_images


class SplitMetrics:
    """Loss, accuracy, precision, recall, F1, calibration and confusion matrix over one pass of a split, on all ranks.
    Counts are int64 and the loss is summed in float32, whatever the precision of the run. It is not an nn.Module, so
    that DeepSpeed, which visits all layers several times per step, does not visit it. IGNORED labels do not count."""

    def __init__(self, num_classes: int, loss: LossName = "cross_entropy"):
        self.num_classes = num_classes
        self.loss: LossName = loss
        # A sum keeps a NaN. torchmetrics' MeanMetric (1.9.0) drops it, or its weights with nan_strategy="disable".
        self.loss_sum = SumMetric(nan_strategy="disable")
        # Its `update_called` says whether anything was counted since the last `reset`.
        self.confusion = MulticlassConfusionMatrix(num_classes, **OPTIONS)
        self.calibration = Calibration()
        self.top_sum = SumMetric(nan_strategy="disable") if num_classes > TOP else None

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Counts a batch: scores (N, classes) in float32, before the softmax; labels (N,)."""
        self.loss_sum.update(loss(self.loss, scores, labels, reduction="none"))
        self.confusion.update(scores.argmax(dim=1), labels)
        self.calibration.update(scores, labels)
        if self.top_sum is not None:
            # torchmetrics' MulticlassAccuracy(top_k=5) (1.9.0) builds a one-hot matrix, several times as slow.
            among = (scores.topk(TOP, dim=1).indices == labels[:, None]).any(dim=1)
            self.top_sum.update(among & (labels != IGNORED))

    def per_class(self) -> dict[str, Tensor]:
        """Returns metrics of each class, float64 (classes,) on the CPU; NaN without images. The precision of a class
        that was never predicted is 0, as in scikit-learn. Every rank calls it."""
        counts = self.confusion.compute().cpu().double()  # true class by predicted class
        right, images, predicted = counts.diagonal(), counts.sum(dim=1), counts.sum(dim=0)
        absent = images == 0
        precision = (right / predicted.clamp(min=1)).masked_fill(absent, torch.nan)
        f1 = (2 * right / (images + predicted)).masked_fill(absent, torch.nan)
        return {"acc": right / images, "precision": precision, "recall": right / images, "f1": f1}

    def overall(self) -> dict[str, float]:
        """Returns metrics of the split. Every rank calls it. precision, recall, f1 and the others of `per_class` are
        macro averages: means over the classes with images. The *_weighted weight each class by its images; the recall
        weighted so would be the accuracy."""
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
            "calibration_error": calibration_error(self.calibration.compute()),
        }
        if self.top_sum is not None:
            metrics[f"acc_top{TOP}"] = (self.top_sum.compute().cpu() / images).item()
        return metrics

    def named(self, split: str, class_names: tuple[str, ...]) -> dict[str, float]:
        """Returns <split>/<metric>, and <split>/<metric>_class/<name> of classes with images. Every rank calls it."""
        per_class = self.per_class()
        curves = ("acc", "precision", "f1") if self.num_classes <= 30 else ("acc",)  # a curve for each class
        logged = {f"{split}/{metric}": value for metric, value in self.overall().items()}
        for metric in curves:
            for name, value in zip(class_names, per_class[metric].tolist(), strict=True):
                if math.isfinite(value):
                    logged[f"{split}/{metric}_class/{name}"] = value
        return logged

    def reset(self, device: torch.device, group: ProcessGroup | None = None) -> None:
        """Sets all counts to 0, on `device`; `group`: the ranks that together see all images once."""
        for metric in (self.loss_sum, self.confusion, self.calibration, self.top_sum):
            if metric is not None:
                metric.process_group = group
                metric.to(device).reset()


class CurveMetrics(SplitMetrics):
    """Adds the curves over all thresholds, of each class against the rest (one-vs-rest). They are exact, so every rank
    keeps, and at the end gathers, all probabilities in float64: 8 bytes x images x classes, 8 MB for CIFAR-100. float32
    would round the probabilities of a confident model to 1, and tie them."""

    def __init__(self, num_classes: int, loss: LossName = "cross_entropy"):
        super().__init__(num_classes, loss)
        self.curves = MetricCollection(
            {
                "roc": MulticlassROC(num_classes, **OPTIONS),
                "precision_recall": MulticlassPrecisionRecallCurve(num_classes, **OPTIONS),
            },
            compute_groups=[["roc", "precision_recall"]],  # the same probabilities, kept once
        )

    def update(self, scores: Tensor, labels: Tensor) -> None:
        super().update(scores, labels)
        self.curves.update(scores.double().softmax(dim=1), labels)

    def per_class(self) -> dict[str, Tensor]:
        """Adds the area under the ROC curve and the average precision. Every rank calls it."""
        # From the curves: torchmetrics' MulticlassAUROC and MulticlassAveragePrecision would sort the scores again.
        areas = torch.tensor([np.trapezoid(hits, false_alarms) for false_alarms, hits in self.roc()])
        sums = torch.tensor([-np.diff(recall) @ precision[:-1] for recall, precision in self.precision_recall()])
        metrics = super().per_class()
        absent = metrics["recall"].isnan()
        alone = absent.sum() == self.num_classes - 1  # there is no rest
        return {
            **metrics,
            "auroc": areas.masked_fill(absent | alone, torch.nan),
            "average_precision": sums.masked_fill(absent, torch.nan),
        }

    def roc(self) -> list[Curve]:
        """Returns false positive rates and true positive rates of each class. Every rank calls it."""
        return _curves(*self.curves.compute()["roc"][:2])

    def precision_recall(self) -> list[Curve]:
        """Returns recalls, from 1 down to 0, and precisions of each class. Every rank calls it."""
        return _curves(*self.curves.compute()["precision_recall"][1::-1])

    def reset(self, device: torch.device, group: ProcessGroup | None = None) -> None:
        super().reset(device, group)
        for curve in self.curves.values():
            curve.process_group = group
        self.curves.to(device).reset()


class Calibration(Metric):
    """Accuracy by confidence, in the bins of Guo et al. 2017, section 2, over all ranks. torchmetrics'
    MulticlassCalibrationError (1.9.0) returns no bins to draw, keeps the confidence of every image, and counts a
    confidence of exactly 1 in a separate bin."""

    full_state_update = False
    totals: Tensor

    def __init__(self):
        super().__init__()
        self.add_state("totals", torch.zeros(BINS, 3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Counts a batch: scores (N, classes), before the softmax; labels (N,)."""
        confidence, predicted = scores.double().softmax(dim=1).max(dim=1)
        edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64, device=scores.device)
        bins = torch.bucketize(confidence, edges[1:-1])  # a bin includes its upper edge
        rows = torch.stack([torch.ones_like(confidence), confidence, predicted == labels], dim=1)
        self.totals = self.totals.index_add(0, bins, rows.masked_fill((labels == IGNORED)[:, None], 0))

    def compute(self) -> Tensor:
        """Returns float64 (BINS, 3): images, sum of their confidences, and correctly classified images."""
        return self.totals


def calibration_error(totals: Tensor) -> float:
    """Returns the expected calibration error: the mean over all images of |accuracy - confidence| of their bin."""
    images, confidence, right = totals.unbind(dim=1)
    return ((confidence - right).abs().sum() / images.sum()).item()


def _curves(abscissae: list[Tensor], ordinates: list[Tensor]) -> list[Curve]:
    return [(x.cpu().double().numpy(), y.cpu().double().numpy()) for x, y in zip(abscissae, ordinates, strict=True)]
