"""The embedded digits are the same images everywhere, their classes are balanced, and the test set has other
handwriting."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cifar_zero import data
from cifar_zero.config.recipe import DataConfig
from cifar_zero.data import digits


def test_two_renderings_are_equal_and_balanced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(digits, "TRAIN_PER_CLASS", 60)
    monkeypatch.setattr(digits, "TEST_PER_CLASS", 20)
    renderings = []
    for seed in (0, 1):
        torch.manual_seed(seed)  # the run's seed has no effect
        np.random.seed(seed)
        config = DataConfig("digits", root=str(tmp_path / str(seed)))
        dataset = data.load(config, data.prepare(config))
        renderings.append(dataset.identity)
        assert np.bincount(dataset.train_labels).tolist() == [60] * 10
        assert np.bincount(dataset.test_labels).tolist() == [20] * 10
    assert renderings[0] == renderings[1]


def test_train_and_test_come_from_different_originals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rendered = []

    def render(originals: np.ndarray, labels: np.ndarray, per_class: int, seed: int):
        rendered.append(originals)
        return iter(())

    monkeypatch.setattr(digits, "render", render)
    digits.write_arrays(DataConfig("digits"), tmp_path)
    train, test = ({image.tobytes() for image in originals} for originals in rendered)
    assert not train & test
    assert len(train) > 4 * len(test) > 4 * 280
