"""A reduced speedrun reaches its accuracy; the benchmark in small, and its table by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import speedrun
from benchmarks.speedrun import WHOLE, Result, Variant
from cifar_zero.config.flags import Config
from cifar_zero.core.errors import UsageError

REACHED = 0.7
"""Share of 1,000 handwritten digits that the network at an eighth of its width names rightly after 50 steps of 100."""


def test_a_reduced_speedrun_reaches_its_accuracy(tmp_path: Path):
    """Digits are not to be mirrored; SGD's learning rates are smaller, as for a batch of 100 they must be."""
    flags = ["--config", "configs/speedrun.yaml", "--accelerator", "cpu", "--precision", "32-true", "--epochs", "1"]
    flags += ["--data.source", "digits", "--data.cache", str(tmp_path), "--model.width", "0.125", "--batch_size", "100"]
    flags += ["--trainer.limit_train_batches", "50", "--trainer.limit_test_batches", "1", "--tta", "none"]
    flags += ["--augment.flip", "none", "--optimizer.bias_lr", "10", "--optimizer.head_lr", "130"]
    result = speedrun.run(speedrun.settled(flags))
    assert result.accuracy["none"] >= REACHED
    assert (result.steps, len(result.epochs)) == (50, 1)
    assert 0 < result.epochs[0] < result.seconds


def test_prints_its_figures(small_data: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    small = ["--accelerator", "cpu", "--precision", "32-true", "--model.width", "0.05", "--batch_size", "64"]
    small += ["--epochs", "2", "--trainer.limit_test_batches", "1", "--trainer.limit_train_batches", "4"]
    monkeypatch.setattr(sys, "argv", ["speedrun", "--runs", "1", "--loop", *small, *small_data])
    assert speedrun.main() == 0
    printed = capsys.readouterr().out
    for text in ("8 steps of 64 images, ", "FLOPs of training\naccuracy ", "an epoch of the eager loop takes "):
        assert text in printed


def test_the_heads_own_rate_is_taken_away_by_that_of_the_biases():
    config = speedrun.settled([*speedrun.RECIPE, "--accelerator", "cpu", "--optimizer.bias_lr", "13.25"])
    assert speedrun.tricks(config)["the head's own learning rate"] == ["--optimizer.head_lr", "13.25"]
    assert not {*speedrun.GPU_TRICKS} & {*speedrun.tricks(config)}


def test_table_by_hand():
    """Differences and ratios are taken within a round."""

    def variant(accuracies: list[float], seconds: list[float]) -> Variant:
        config = Config(tta="mirror")
        results = [
            Result({"mirror": accuracy, "none": accuracy - 0.125}, time, [], 1)
            for accuracy, time in zip(accuracies, seconds, strict=True)
        ]
        return Variant(config, results)

    table = speedrun.table({WHOLE: variant([0.5, 0.75], [1, 2]), "- x": variant([0.25, 0.75], [2, 8])})
    assert table.splitlines()[2:] == [
        "| the recipe | 62.50 ± 17.68 | +0.00 | 1.00 |",
        "| - x | 50.00 ± 35.36 | -12.50 | 3.00 |",
        "| the recipe, --tta mirror | 62.50 ± 17.68 | +0.00 | |",
        "| the recipe, --tta none | 50.00 ± 17.68 | -12.50 | |",
    ]


def test_each_trick_can_be_switched():
    recipe = [*speedrun.RECIPE, "--accelerator", "cpu", "--precision", "32-true"]
    seen = [speedrun.settled(recipe)]
    switches = {**speedrun.tricks(seen[0]), **speedrun.GPU_TRICKS, **speedrun.added(seen[0])}
    for flags in switches.values():
        config = speedrun.settled([*recipe, *flags])
        assert config not in seen, flags
        seen.append(config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--runs", "0"], "--runs must be at least 1"),
        (["--devices", "2"], "one device"),
        (["--ema", "0.9"], "--ema does nothing here"),
        (["--weights", "nowhere"], "--weights does nothing here"),
    ],
)
def test_mistakes_are_one_clear_line(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["speedrun", "--accelerator", "cpu", "--precision", "32-true", *flags])
    with pytest.raises(UsageError, match=message):
        speedrun.main()
