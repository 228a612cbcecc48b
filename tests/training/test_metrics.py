"""Compares every metric of a split with scikit-learn's metric of the same scores, on one rank and on two real ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from cifar_zero.data.dataset import IGNORED, EvalOrder
from cifar_zero.training.metrics import BINS, SplitMetrics

reference: Any = sklearn.metrics  # Any: it has no annotations, and pyright misreads its docstrings

ROWS = 2_999
"""Number of rows. Neither two ranks nor the batch size divide it."""

BATCH_SIZE = 400
CASES = {"ten classes": 10, "three, of which one has no images": 3}
RANKS = [pytest.param(1, id="one rank"), pytest.param(2, id="two ranks", marks=pytest.mark.distributed)]


def scores_and_labels(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scores (ROWS, classes) of a model that is often right and rather confident, and labels (ROWS,)."""
    generator, classes = torch.Generator().manual_seed(0), CASES[case]
    labels = torch.randint(0, classes, (ROWS,), generator=generator)
    labels[labels == 1] = 0 if classes == 3 else 1
    scores = torch.randn(ROWS, classes, generator=generator)
    scores[torch.arange(ROWS), labels] += 1.5
    return 3 * scores, labels


def measure(case: str, rank: int, ranks: int) -> dict[str, Any]:
    """Returns a rank's metrics, from padded batches as the data module gives them."""
    scores, labels = scores_and_labels(case)
    # These rows are padding. If padding counted, it would change every metric.
    scores = torch.cat([scores, 50 * torch.ones(1, CASES[case]).cumsum(1)])
    labels = torch.cat([labels, torch.tensor([IGNORED])])
    metrics = SplitMetrics(CASES[case], curves=True)
    metrics.reset(torch.device("cpu"))
    for positions in EvalOrder(ROWS, BATCH_SIZE, ranks, rank).positions():
        metrics.update(scores[positions], labels[positions])
    return {
        **metrics.overall(),
        "per_class": metrics.per_class(),
        "confusion": metrics.confusion.compute(),
        "roc": list(zip(*metrics.roc.compute()[:2], strict=True)),
        "precision_recall": list(zip(*metrics.precision_recall.compute()[1::-1], strict=True)),
    }


def measure_as_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save({case: measure(case, rank, 2) for case in CASES}, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=RANKS)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns the metrics of rank 0 in each case, with one or two ranks."""
    if request.param == 1:
        return {case: measure(case, 0, 1) for case in CASES}
    folder = tmp_path_factory.mktemp("ranks")
    spawn(measure_as_rank, (folder,), nprocs=2)
    return torch.load(folder / "0.pt", weights_only=False)


@pytest.mark.parametrize("case", CASES)
def test_the_metrics_equal_those_of_scikit_learn(case: str, measured: dict[str, dict[str, Any]]):
    found, (scores, tensor) = measured[case], scores_and_labels(case)
    probabilities, predicted = scores.double().softmax(1).numpy(), scores.argmax(1).numpy()
    labels, present = tensor.numpy(), tensor.unique().numpy()
    close = {"rel": 0, "abs": 1e-6}
    assert (
        found["confusion"].numpy() == reference.confusion_matrix(labels, predicted, labels=range(CASES[case]))
    ).all()
    assert found["loss"] == pytest.approx(
        reference.log_loss(labels, probabilities, labels=range(CASES[case])), rel=1e-6, abs=0
    )
    assert found["acc"] == reference.accuracy_score(labels, predicted)
    averages = {"macro": "", "weighted": "_weighted"}
    for average, suffix in averages.items():
        precision, recall, f1, _ = reference.precision_recall_fscore_support(
            labels, predicted, labels=present, average=average, zero_division=0
        )
        assert found[f"precision{suffix}"] == pytest.approx(precision, **close)
        assert found[f"f1{suffix}"] == pytest.approx(f1, **close)
        assert found["acc" if suffix else "recall"] == pytest.approx(recall, **close)
    if case == "three, of which one has no images":
        assert "acc_top5" not in found
    else:
        top = reference.top_k_accuracy_score(labels, probabilities, k=5, labels=range(CASES[case]))
        assert found["acc_top5"] == pytest.approx(top, **close)

    precision, recall, f1, _ = reference.precision_recall_fscore_support(
        labels, predicted, labels=present, zero_division=0
    )
    one_hot = labels[:, None] == present
    of_present = probabilities[:, present]
    expected = {
        "acc": recall,
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "auroc": reference.roc_auc_score(one_hot, of_present, average=None),
        "average_precision": reference.average_precision_score(one_hot, of_present, average=None),
    }
    assert list(found["per_class"]) == list(expected)
    absent = np.setdiff1d(range(CASES[case]), present)
    for figure, values in expected.items():
        assert found["per_class"][figure][present].numpy() == pytest.approx(values, **close), figure
        assert found["per_class"][figure][absent].isnan().all()
        if figure != "acc":
            assert found[figure] == pytest.approx(np.mean(values), **close)


@pytest.mark.parametrize("case", CASES)
def test_the_curves_equal_those_of_scikit_learn(case: str, measured: dict[str, dict[str, Any]]):
    found, (scores, labels) = measured[case], scores_and_labels(case)
    probabilities = scores.double().softmax(1).numpy()
    for label in labels.unique().tolist():
        expected = reference.roc_curve(labels == label, probabilities[:, label], drop_intermediate=False)[:2]
        for values, right in zip(found["roc"][label], expected, strict=True):
            np.testing.assert_allclose(values, right, rtol=0, atol=1e-6)
        expected = reference.precision_recall_curve(labels == label, probabilities[:, label])[:2][::-1]
        for values, right in zip(found["precision_recall"][label], expected, strict=True):
            np.testing.assert_allclose(values, right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_calibration_by_brute_force(case: str, measured: dict[str, dict[str, Any]]):
    """The reference is the formula of Guo et al. 2017, computed bin by bin."""
    scores, labels = scores_and_labels(case)
    confidence, predicted = scores.double().softmax(1).max(1)
    error = 0.0
    for number in range(BINS):
        inside = (confidence > number / BINS) & (confidence <= (number + 1) / BINS)
        if inside.any():
            accuracy = (predicted == labels)[inside].double().mean()
            error += inside.sum().item() / ROWS * abs(accuracy - confidence[inside].mean()).item()
    assert measured[case]["calibration_error"] == pytest.approx(error, abs=1e-5)


def test_a_class_without_images_has_no_curve():
    metrics = SplitMetrics(3)
    metrics.update(torch.eye(3), torch.tensor([0, 2, 2]))
    named = metrics.named("val", ("a", "b", "c"))
    assert {name for name in named if "_class/" in name} == {
        f"val/{figure}_class/{name}" for figure in ("acc", "precision", "f1") for name in "ac"
    }
    assert named["val/acc"] == pytest.approx(2 / 3)
    assert named["val/precision_class/a"] == 1


def test_a_loss_with_a_nan_in_it_is_nan():
    scores, labels = scores_and_labels("ten classes")
    scores[::2] = torch.nan
    metrics = SplitMetrics(10)
    metrics.update(scores, labels)
    assert np.isnan(metrics.overall()["loss"])


def test_a_padded_nan_is_not_counted():
    scores, labels = scores_and_labels("ten classes")
    clean, padded = SplitMetrics(10), SplitMetrics(10)
    clean.update(scores, labels)
    padded.update(torch.cat([scores, torch.full((1, 10), torch.nan)]), torch.cat([labels, torch.tensor([IGNORED])]))
    assert padded.overall() == clean.overall()
