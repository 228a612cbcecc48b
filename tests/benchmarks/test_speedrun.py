"""A reduced speedrun reaches its accuracy; the benchmark in small."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import speedrun
from cifar_zero.core.errors import UsageError
from tests.support.helpers import of_make_fuzz

REACHED = 70
"""Percent of 1,000 handwritten digits that the model at an eighth of its width classifies correctly after 50 steps of
100 images."""


@of_make_fuzz
def test_a_reduced_speedrun_reaches_its_accuracy(tmp_path: Path):
    """Digits are not to be mirrored; SGD's learning rates are smaller, as for a batch of 100 they must be."""
    flags = ["--config", "configs/speedrun.yaml", "--accelerator", "cpu", "--precision", "32-true", "--epochs", "1"]
    flags += ["--data.source", "digits", "--data.cache", str(tmp_path), "--model.width", "0.125", "--batch_size", "100"]
    flags += ["--trainer.limit_train_batches", "50", "--trainer.limit_test_batches", "1", "--tta", "none"]
    flags += ["--augment.flip", "none", "--optimizer.bias_lr", "10", "--optimizer.head_lr", "130", "--logger", "none"]
    result = speedrun.train(speedrun.resolved(flags))
    assert result.accuracy >= REACHED
    assert result.steps == 50
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "2"], "one device"),
        (["--ema", "0.9"], "--ema does nothing in this benchmark"),
    ],
)
def test_mistakes_are_one_clear_line(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["speedrun", "--accelerator", "cpu", "--precision", "32-true", *flags])
    with pytest.raises(UsageError, match=message):
        speedrun.main()
