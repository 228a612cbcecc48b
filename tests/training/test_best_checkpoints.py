"""Tests that --monitor and --save_top_k keep the checkpoints of the best validations."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cifar_zero.checkpoints.read import read
from tests.support.helpers import metrics_of, run_folder_of, train_all

EPOCHS = 5
RUNS = {"val/loss": ("--save_top_k 2", False, 2), "val/f1": ("", True, 1)}
"""For each metric: further flags, whether a high value is good, and the number of kept checkpoints."""


@pytest.fixture(scope="module")
def trained(small_data: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Returns the directory of the runs, and what they printed. One more run does not learn, stops early, and keeps no
    best checkpoint."""
    out = tmp_path_factory.mktemp("out")
    same = [*small_data, "--batch_size", "16", "--accelerator", "cpu", "--epochs", str(EPOCHS)]
    flags = {
        out / name[4:]: [*same, "--optimizer.lr", "0.05", "--monitor", name, *more.split()]
        for name, (more, *_) in RUNS.items()
    }
    stuck = ["--optimizer.lr", "0", "--early_stopping", "1", "--monitor", "val/loss", "--save_top_k", "0"]
    return out, train_all({**flags, out / "stuck": [*same, *stuck]})


@pytest.mark.parametrize("name", RUNS)
def test_the_best_validations_are_kept(name: str, trained: tuple[Path, str]):
    _, high, count = RUNS[name]
    run = run_folder_of(trained[0] / name[4:])
    events = EventAccumulator(str(run)).Reload()
    values = {event.step: event.value for event in events.Scalars(name)}  # by optimizer step, after each epoch
    assert len(values) == EPOCHS
    best = sorted(values, key=lambda step: values[step], reverse=high)[:count]
    kept = [read(file)["global_step"] for file in (run / "checkpoints").glob("best-*.ckpt")]
    assert sorted(kept) == sorted(best)
    assert read(run / "checkpoints" / "last.ckpt")["global_step"] == max(values)


def test_early_stopping_looks_at_the_same_metric(trained: tuple[Path, str]):
    folder = run_folder_of(trained[0] / "stuck")
    assert metrics_of(folder)["epochs"] == 2
    assert [file.name for file in (folder / "checkpoints").iterdir()] == ["last.ckpt"]
    assert "early stopping after epoch 2: val/loss has not improved on 2.3" in trained[1]
