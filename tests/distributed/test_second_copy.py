"""ZeRO++'s second copy of the parameters on two ranks: only where parameters are gathered from changes."""

from __future__ import annotations

import pytest

from tests.support.helpers import largest_difference, last_weights, run_folder_of, train_all

pytestmark = pytest.mark.distributed


def test_ends_with_the_weights_of_stage_3(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]):
    """Weights agree bit for bit, also in mixed precision, and after resuming a run without the second copy."""
    folder = tmp_path_factory.mktemp("second_copy")
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "16", "--model", "mlp"]
    same += ["--strategy", "deepspeed_stage_3", "--optimizer.lr", "0.05", "--data.val_fraction", "0"]
    same += ["--trainer.limit_test_batches", "1", "--max_steps"]
    copied, mixed = ["--zero.hpz_partition_size", "2"], ["--precision", "bf16-mixed"]
    train_all({folder / "half": [*same, "3"], folder / "plain": [*same, "6"]})
    train_all(
        {
            folder / "copied": [*same, "6", *copied, "--resume", str(run_folder_of(folder / "half"))],
            folder / "mixed": [*same, "3", *mixed],
            folder / "mixed and copied": [*same, "3", *mixed, *copied],
        }
    )
    weights = {run.name: last_weights(run_folder_of(run)) for run in folder.iterdir()}
    assert largest_difference(weights["copied"], weights["plain"]) == 0
    assert largest_difference(weights["mixed and copied"], weights["mixed"]) == 0
    assert largest_difference(weights["half"], weights["plain"]) > 0
