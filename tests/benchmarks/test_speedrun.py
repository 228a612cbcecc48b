"""A reduced speedrun reaches its accuracy; the benchmark in small."""

from __future__ import annotations

from pathlib import Path

from benchmarks import speedrun
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
