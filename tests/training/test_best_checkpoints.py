"""Tests that --monitor and --save_top_k keep the checkpoints of the best validations."""

from pathlib import Path

import pytest

from cifar_zero.checkpoints.read import read
from cifar_zero.training.callbacks.monitors import EarlyStop
from tests.support.helpers import curve, metrics_of, run_folder_of, train_all

FLAGS = ["--batch_size", "16", "--accelerator", "cpu", "--epochs", "4"]


@pytest.mark.parametrize(("metric", "high_is_good", "count"), [("val/loss", False, 2), ("val/f1", True, 1)])
def test_the_best_validations_are_kept(
    metric: str, high_is_good: bool, count: int, small_data: list[str], tmp_path: Path
):
    flags = ["--optimizer.lr", "0.05", "--monitor", metric, "--save_top_k", str(count)]
    train_all({tmp_path: [*small_data, *FLAGS, *flags]})
    values = curve(tmp_path, metric)  # by optimizer step, after each epoch
    assert len(values) == 4
    best = sorted(values, key=lambda step: values[step], reverse=high_is_good)[:count]
    folder = run_folder_of(tmp_path) / "checkpoints"
    assert sorted(read(file)["global_step"] for file in folder.glob("best-*.ckpt")) == sorted(best)
    assert read(folder / "last.ckpt")["global_step"] == max(values)


def test_an_epoch_without_a_validation_is_not_judged(small_data: list[str], tmp_path: Path):
    """The second validation is better than the first one, and --max_steps ends the third epoch after three steps."""
    flags = ["--optimizer.lr", "0.001", "--monitor", "val/loss", "--save_top_k", "2", "--early_stopping", "1"]
    said = train_all({tmp_path: [*small_data, *FLAGS, *flags, "--max_steps", "75"]})
    first, second = curve(tmp_path, "val/loss").values()
    assert second < first
    best = sorted(file.name for file in (run_folder_of(tmp_path) / "checkpoints").glob("best-*.ckpt"))
    assert best == ["best-epoch00-step000036.ckpt", "best-epoch01-step000072.ckpt"]
    assert "early stopping" not in said


def test_early_stopping_looks_at_the_same_metric(small_data: list[str], tmp_path: Path):
    flags = ["--optimizer.lr", "0", "--early_stopping", "1", "--monitor", "val/loss", "--save_top_k", "0"]
    said = train_all({tmp_path: [*small_data, *FLAGS, *flags]})
    assert metrics_of(tmp_path)["epochs"] == 2
    assert [file.name for file in (run_folder_of(tmp_path) / "checkpoints").iterdir()] == ["last.ckpt"]
    assert "early stopping after epoch 2: val/loss has not improved on 2.3" in said


@pytest.mark.parametrize(
    ("monitor", "loss", "waited"), [("val/loss", "mse", 0), ("val/loss", "bce", 2), ("val/f1", "mse", 2)]
)
def test_early_stopping_begins_again_under_another_loss(monitor: str, loss: str, waited: int):
    saved, resumed = EarlyStop(monitor, 3, "min", "bce"), EarlyStop(monitor, 3, "min", loss)
    saved.wait_count = 2
    resumed.load_state_dict(saved.state_dict())
    assert resumed.wait_count == waited
