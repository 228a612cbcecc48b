"""What a network is measured by on a split, over all ranks: counts by torchmetrics, and the figures that follow.

Which figures follow from the confusion matrix, and what becomes of a class without images, is in docs/outputs.md.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torchmetrics import Metric, MetricCollection, SumMetric
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MulticlassPrecisionRecallCurve,
    MulticlassROC,
)

from cifar_zero.data.dataset import IGNORED

Curve = tuple[Tensor, Tensor]
"""Abscissae and ordinates of a curve, both float64 (points,) on the CPU."""

TOP = 5
"""Of the top-5 accuracy, as in ImageNet's challenge (Russakovsky et al. 2015, https://arxiv.org/abs/1409.0575). Of no
more classes than that it would be 1, and is left out."""

BINS = 15
"""Bins of confidence, as many as in Guo et al. 2017, https://arxiv.org/abs/1706.04599, table 1."""

CURVE_CLASSES = 30
"""Most classes whose precision and F1 have a curve each; of more, the accuracy alone."""


class SplitMetrics:
    """Loss, accuracy, precision, recall, F1, calibration and confusion matrix over one pass of a split, on all ranks.

    Counts are int64 and the loss is summed in float32, whatever the precision of the engine. It is no nn.Module, and so
    not among the layers that DeepSpeed goes through several times a step. Labels that are IGNORED count nowhere.
    """

    def __init__(self, num_classes: int):
        self.num_classes = num_classes
        # Their check of the arguments would wait for the device in each batch; the sources have checked the labels.
        options = {"ignore_index": IGNORED, "validate_args": False}
        # A sum keeps a NaN. torchmetrics' MeanMetric (1.9.0) drops it, or its weights with nan_strategy="disable".
        self.loss_sum = SumMetric(nan_strategy="disable")
        self.confusion = MulticlassConfusionMatrix(num_classes, **options)
        self.calibration = Calibration()
        self.top_sum = SumMetric(nan_strategy="disable") if num_classes > TOP else None

    @property
    def update_called(self) -> bool:
        """Whether anything was counted since the last `reset`."""
        return self.loss_sum.update_called

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Counts a batch: scores (N, classes) in float32, before the softmax; labels (N,)."""
        self.loss_sum.update(F.cross_entropy(scores, labels, reduction="none", ignore_index=IGNORED))
        self.confusion.update(scores.argmax(dim=1), labels)
        self.calibration.update(scores, labels)
        if self.top_sum is not None:
            # torchmetrics' MulticlassAccuracy(top_k=5) (1.9.0) goes by way of a one-hot matrix, several times as slow.
            among = (scores.topk(TOP, dim=1).indices == labels[:, None]).any(dim=1)
            self.top_sum.update(among & (labels != IGNORED))

    def per_class(self) -> dict[str, Tensor]:
        """Figures of each class, float64 (classes,) on the CPU; NaN of a class without images. Every rank calls it.

        The precision of a class that was never predicted is 0, as in scikit-learn.
        """
        counts = self.confusion.compute().cpu().double()  # true class by predicted class
        right, images, predicted = counts.diagonal(), counts.sum(dim=1), counts.sum(dim=0)
        absent = images == 0
        precision = (right / predicted.clamp(min=1)).masked_fill(absent, torch.nan)
        f1 = (2 * right / (images + predicted)).masked_fill(absent, torch.nan)
        return {"acc": right / images, "precision": precision, "recall": right / images, "f1": f1}

    def overall(self) -> dict[str, float]:
        """Figures of the split. Every rank calls it.

        precision, recall, f1 and what `per_class` has besides are macro averages: means over the classes with images;
        the *_weighted weigh each class with its images, for which the recall would be the accuracy once more.
        """
        return self._overall(self.per_class())

    def _overall(self, per_class: dict[str, Tensor]) -> dict[str, float]:
        counts = self.confusion.compute().cpu().double()
        images = counts.sum()
        shares = counts.sum(dim=1) / images
        top = {} if self.top_sum is None else {f"acc_top{TOP}": (self.top_sum.compute().cpu() / images).item()}
        return {
            "loss": (self.loss_sum.compute().cpu() / images).item(),
            "acc": (counts.trace() / images).item(),
            **top,
            **{name: values.nanmean().item() for name, values in per_class.items() if name != "acc"},
            "precision_weighted": (per_class["precision"] * shares).nansum().item(),
            "f1_weighted": (per_class["f1"] * shares).nansum().item(),
            "calibration_error": calibration_error(self.calibration.compute()),
        }

    def named(self, split: str, class_names: tuple[str, ...]) -> dict[str, float]:
        """<split>/<figure>, and <split>/<figure>_class/<name> of the classes with images. Every rank calls it."""
        per_class = self.per_class()
        curves = ("acc", "precision", "f1") if self.num_classes <= CURVE_CLASSES else ("acc",)
        of_classes = {
            f"{split}/{figure}_class/{name}": value
            for figure, values in per_class.items()
            if figure in curves
            for name, value in zip(class_names, values.tolist(), strict=True)
            if math.isfinite(value)
        }
        return {**{f"{split}/{figure}": value for figure, value in self._overall(per_class).items()}, **of_classes}

    def reset(self, device: torch.device, group: ProcessGroup | None = None) -> None:
        """Forgets all that was counted, and counts on `device` from now on; `group`: ranks that see all images once."""
        for metric in (self.loss_sum, self.confusion, self.calibration, self.top_sum):
            if metric is not None:
                metric.process_group = group
                metric.to(device).reset()


class CurveMetrics(SplitMetrics):
    """All of that, and the curves over all thresholds, of each class against the rest (one-vs-rest).

    They are exact, and so every rank keeps and at the end gathers all probabilities, in float64: 8 bytes x images x
    classes, 8 MB for CIFAR-100. float32 would round the probabilities of a sure network to 1 and make ties of them.
    """

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        options = {"ignore_index": IGNORED, "validate_args": False}
        self.curves = MetricCollection(
            {
                "roc": MulticlassROC(num_classes, **options),
                "precision_recall": MulticlassPrecisionRecallCurve(num_classes, **options),
            },
            compute_groups=[["roc", "precision_recall"]],  # the same probabilities, kept once
        )

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Counts a batch, as SplitMetrics does, and keeps its probabilities."""
        super().update(scores, labels)
        self.curves.update(scores.double().softmax(dim=1), labels)

    def per_class(self) -> dict[str, Tensor]:
        """Those of SplitMetrics, with the area under the ROC curve and the average precision. Every rank calls it."""
        # From the curves: torchmetrics' own MulticlassAUROC and MulticlassAveragePrecision would sort the scores again.
        areas = torch.stack([torch.trapezoid(hits, false_alarms) for false_alarms, hits in self.roc()])
        sums = torch.stack([-recall.diff() @ precision[:-1] for recall, precision in self.precision_recall()])
        figures = super().per_class()
        absent = figures["recall"].isnan()
        alone = absent.sum() == self.num_classes - 1  # there is no rest
        return {
            **figures,
            "auroc": areas.masked_fill(absent | alone, torch.nan),
            "average_precision": sums.masked_fill(absent, torch.nan),
        }

    def roc(self) -> list[Curve]:
        """False positive rates and true positive rates of each class. Every rank calls it."""
        false_positive_rates, true_positive_rates, _ = self.curves.compute()["roc"]
        return _curves(false_positive_rates, true_positive_rates)

    def precision_recall(self) -> list[Curve]:
        """Recalls, from 1 down to 0, and precisions of each class. Every rank calls it."""
        precisions, recalls, _ = self.curves.compute()["precision_recall"]
        return _curves(recalls, precisions)

    def reset(self, device: torch.device, group: ProcessGroup | None = None) -> None:
        """See SplitMetrics."""
        super().reset(device, group)
        for curve in self.curves.values():
            curve.process_group = group
        self.curves.to(device).reset()


class Calibration(Metric):
    """How often a network is right, by how sure it is: the bins of Guo et al. 2017, section 2, over all ranks.

    torchmetrics' MulticlassCalibrationError (1.9.0) hands out no bins to draw, keeps the confidence of every image, and
    counts a confidence of exactly 1 in a bin of its own.
    """

    full_state_update = False
    totals: Tensor

    def __init__(self):
        super().__init__()
        self.add_state("totals", torch.zeros(BINS, 3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Counts a batch: scores (N, classes), before the softmax; labels (N,)."""
        confidence, predicted = scores.double().softmax(dim=1).max(dim=1)
        edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64, device=scores.device)
        bins = torch.bucketize(confidence, edges[1:-1])  # the upper edge belongs to a bin
        rows = torch.stack([torch.ones_like(confidence), confidence, predicted == labels], dim=1)
        self.totals = self.totals.index_add(0, bins, rows.masked_fill((labels == IGNORED)[:, None], 0))

    def compute(self) -> Tensor:
        """float64 (BINS, 3): images, sum of their confidences, and images that were classified rightly."""
        return self.totals


def calibration_error(totals: Tensor) -> float:
    """The expected calibration error (ECE): mean over all images of |accuracy - mean confidence| of an image's bin.

    Args:
        totals: of `Calibration.compute`.
    """
    images, confidence, right = totals.unbind(dim=1)
    return ((confidence - right).abs().sum() / images.sum()).item()


def _curves(abscissae: list[Tensor], ordinates: list[Tensor]) -> list[Curve]:
    return [(x.cpu().double(), y.cpu().double()) for x, y in zip(abscissae, ordinates, strict=True)]
