"""The embedded digits: the same images everywhere, balanced, and a test set of other handwriting."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from cifar_zero import data
from cifar_zero.config.settings import DataConfig
from cifar_zero.data import digits


def test_two_renderings_are_equal_and_balanced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "TRAIN_PER_CLASS", 60)
    monkeypatch.setattr(digits, "TEST_PER_CLASS", 20)
    hashes = set()
    for seed in (0, 1):
        torch.manual_seed(seed)  # the run's seed has no say
        np.random.seed(seed)
        config = DataConfig("digits", root=str(tmp_path / str(seed)))
        dataset = data.load(config, data.prepare(config))
        arrays = (dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels)
        hashes.add(hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest())
        assert np.bincount(dataset.train_labels).tolist() == [60] * 10
        assert np.bincount(dataset.test_labels).tolist() == [20] * 10
        assert dataset.train_images.shape == (600, 3, 32, 32)
    assert len(hashes) == 1


def test_train_and_test_come_from_different_originals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []

    def render(originals: np.ndarray, labels: np.ndarray, per_class: int, seed: int):
        rendered.append((originals, labels))
        return iter(())

    monkeypatch.setattr(digits, "render", render)
    digits.build(DataConfig("digits"), tmp_path)
    (train, train_labels), (test, test_labels) = rendered
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in test}
    assert len(train) + len(test) == 1797
    assert np.bincount(train_labels).min() > 4 * np.bincount(test_labels).max()
    assert np.bincount(test_labels).min() >= 28


def test_the_class_shows_in_the_shape_and_not_in_the_colour() -> None:
    """Least squares from features to classes: where the ink is predicts far better than chance, the colour does not."""
    pixels, targets = load_digits(return_X_y=True)
    originals = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)
    batches = list(digits.render(originals, targets, per_class=300, seed=0))
    images = np.concatenate([images for images, _ in batches]).astype(np.float64) / 255
    labels = np.concatenate([labels for _, labels in batches])
    colours = images.mean(axis=(2, 3))
    shapes = np.abs(images - np.median(images, axis=(2, 3), keepdims=True)).mean(axis=1)[:, ::2, ::2].reshape(3000, -1)
    assert accuracy(colours, labels) < 0.2
    assert accuracy(shapes, labels) > 0.5


def accuracy(features: np.ndarray, labels: np.ndarray) -> float:
    """Returns a linear classifier's accuracy; it is fitted on the first two thirds and tested on the rest."""
    design = np.column_stack([features, np.ones(len(features))])
    weights = np.linalg.lstsq(design[:2000], np.eye(10)[labels[:2000]], rcond=None)[0]
    return float(np.mean((design[2000:] @ weights).argmax(axis=1) == labels[2000:]))
