"""Compares the figures of the test with results of all test images in one pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cifar_zero.config.settings import make_settings
from cifar_zero.training.callbacks import figures

NAMES = ["cat", "dog", "frog"]


def test_the_confusion_matrix_counts_the_test_images_of_all_batches(
    fit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """The names of the classes are in the order of the labels."""
    confusion: list[Any] = []
    monkeypatch.setattr(figures, "confusion_figure", lambda *given: confusion.extend(given))
    monkeypatch.setattr(figures, "_write", lambda *_: None)  # tests/distributed/test_faults.py has the files
    run = fit(make_settings(epochs=1, batch_size=8), 32, figures.TestFigures())
    run.datamodule.classes = run.datamodule.classes[::-1]  # not in alphabetical order
    run.trainer.test(run.module, datamodule=run.datamodule, verbose=False)
    images, labels = run.datamodule.test_images[:-1], run.datamodule.test_labels[:-1]  # without the padding
    with torch.no_grad():
        predicted = run.module(images).argmax(dim=1)
    counts = np.zeros((10, 10), dtype=int)
    np.add.at(counts, (labels.numpy(), predicted.numpy()), 1)
    assert np.array_equal(confusion[0], counts)
    assert confusion[1] == run.datamodule.classes


def test_a_row_of_the_confusion_matrix_is_a_true_class_and_a_column_a_predicted_one():
    counts = torch.tensor([[3, 1, 0], [0, 0, 0], [5, 0, 15]])  # no image of the second class
    axes = figures.confusion_figure(counts, NAMES).axes[0]
    assert np.array_equal(np.asarray(axes.images[0].get_array()), counts)
    assert [label.get_text() for label in axes.get_yticklabels()] == NAMES
    assert axes.get_title() == "24 test images, 75.00% correct"


def test_each_class_has_its_line_and_its_area():
    x, y = torch.tensor([0.0, 0.0, 0.9]), torch.tensor([0.0, 0.6, 1.0])
    areas = torch.tensor([0.5, torch.nan, 0.75])  # no image of the second class
    axes = figures.curve_figure(([x] * 3, [y] * 3), areas, NAMES, "AUROC", ("x", "y")).axes[0]
    legend: Any = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["cat AUC=0.500", "dog AUC=nan", "frog AUC=0.750"]
    assert np.array_equal(axes.get_lines()[0].get_xydata(), torch.stack([x, y], dim=1))
