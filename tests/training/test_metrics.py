"""Compares every metric of a split with scikit-learn's metric of the same scores, on one rank and on two real ranks."""

from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import torch.distributed as dist

from cifar_zero.data.dataset import IGNORED, EvalOrder
from cifar_zero.launch import rank_environment
from cifar_zero.training.metrics import BINS, SplitMetrics
from tests.support.helpers import on_ranks

reference: Any = sklearn.metrics  # Any: it has no annotations, and pyright misreads its docstrings

ROWS = 2_999
"""Number of rows. Neither two ranks nor the batch size divide it."""

BATCH_SIZE = 400
CLASSES = 10
ABSENT = 1
"""A class without images."""

RANKS = [pytest.param(1, id="one rank"), pytest.param(2, id="two ranks", marks=pytest.mark.distributed)]


def scores_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scores (ROWS, CLASSES) of a model that is often right and rather confident, and labels (ROWS,)."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    labels[labels == ABSENT] = 0
    scores = torch.randn(ROWS, CLASSES, generator=generator)
    scores[torch.arange(ROWS), labels] += 1.5
    return 3 * scores, labels


def measure(rank: int, ranks: int) -> dict[str, Any]:
    """Returns a rank's metrics, from padded batches as the data module gives them."""
    scores, labels = scores_and_labels()
    # These rows are padding. If padding counted, it would change every metric.
    scores = torch.cat([scores, 50 * torch.ones(1, CLASSES).cumsum(1)])
    labels = torch.cat([labels, torch.tensor([IGNORED])])
    metrics = SplitMetrics(CLASSES, curves=True)
    metrics.reset(torch.device("cpu"))
    for positions in EvalOrder(ROWS, BATCH_SIZE, ranks, rank).positions():
        metrics.update(scores[positions], labels[positions])
    return {
        **metrics.overall(),
        "per_class": metrics.per_class(),
        "confusion": metrics.confusion.compute(),
    }


def measure_as_rank(folder: str) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = rank_environment.global_rank()
    torch.save(measure(rank, 2), f"{folder}/{rank}.pt")


@pytest.fixture(scope="module", params=RANKS)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the metrics of rank 0, with one or two ranks."""
    if request.param == 1:
        return measure(0, 1)
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, measure_as_rank, str(folder))
    return torch.load(folder / "0.pt", weights_only=False)


def test_the_metrics_equal_those_of_scikit_learn(measured: dict[str, Any]):
    scores, tensor = scores_and_labels()
    probabilities, predicted = scores.double().softmax(1).numpy(), scores.argmax(1).numpy()
    labels, present, classes = tensor.numpy(), tensor.unique().numpy(), range(CLASSES)
    assert (measured["confusion"].numpy() == reference.confusion_matrix(labels, predicted, labels=classes)).all()
    weighted, macro = (
        reference.precision_recall_fscore_support(labels, predicted, labels=present, average=average)
        for average in ("weighted", None)
    )
    one_hot, of_present = labels[:, None] == present, probabilities[:, present]
    of_classes = {
        "acc": macro[1],
        "precision": macro[0],
        "recall": macro[1],
        "f1": macro[2],
        "auroc": reference.roc_auc_score(one_hot, of_present, average=None),
        "average_precision": reference.average_precision_score(one_hot, of_present, average=None),
    }
    expected = {figure: np.mean(values) for figure, values in of_classes.items()} | {
        "loss": reference.log_loss(labels, probabilities, labels=classes),
        "acc": reference.accuracy_score(labels, predicted),
        "acc_top5": reference.top_k_accuracy_score(labels, probabilities, k=5, labels=classes),
        "precision_weighted": weighted[0],
        "f1_weighted": weighted[2],
    }
    assert {figure: measured[figure] for figure in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert list(measured["per_class"]) == list(of_classes)
    for figure, values in of_classes.items():
        actual = measured["per_class"][figure]
        assert actual[present].numpy() == pytest.approx(values, rel=0, abs=1e-6), figure
        assert actual[ABSENT].isnan()


def test_the_calibration_error_is_that_of_guo_et_al(measured: dict[str, Any]):
    """The formula of Guo et al. 2017 sums, over the bins, the distance between the number of right predictions and the
    sum of their confidences."""
    scores, labels = scores_and_labels()
    confidence, predicted = scores.double().softmax(1).max(1)
    bins = (confidence * BINS).ceil().long()  # a bin includes its upper edge
    errors = (predicted == labels).double() - confidence
    of_bins = torch.zeros(BINS + 1, dtype=torch.float64).index_add(0, bins, errors)
    assert measured["calibration_error"] == pytest.approx(of_bins.abs().sum().item() / ROWS, abs=1e-5)


def test_a_class_without_images_has_no_curve():
    metrics = SplitMetrics(3)
    metrics.update(torch.eye(3), torch.tensor([0, 2, 2]))
    named = metrics.named("val", ("a", "b", "c"))
    assert {name for name in named if "_class/" in name} == {
        f"val/{figure}_class/{name}" for figure in ("acc", "precision", "f1") for name in "ac"
    }
    assert named["val/precision_class/a"] == 1


def test_a_loss_with_a_nan_in_it_is_nan():
    scores, labels = scores_and_labels()
    scores[::2] = torch.nan
    metrics = SplitMetrics(CLASSES)
    metrics.update(scores, labels)
    assert np.isnan(metrics.overall()["loss"])
