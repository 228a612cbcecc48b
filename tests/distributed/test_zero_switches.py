"""Tests that ZeRO's options for buckets, prefetching and memory do not change a bit of the weights, on two ranks."""

from pathlib import Path

import pytest

from tests.support.helpers import largest_difference, last_weights, train_all

pytestmark = pytest.mark.distributed


SMALL = ["--zero.reduce_bucket_size", "1000"]
STAGE_2 = [*SMALL, "--zero.round_robin_gradients", "true"]
STAGE_3 = [*SMALL, "--zero.prefetch_bucket_size", "0", "--zero.max_live_parameters", "0"]
STAGE_3 += ["--zero.param_persistence_threshold", "0"]


def test_buckets_prefetching_and_the_order_of_the_gradients(small_data: list[str], tmp_path: Path):
    """A run is also resumed with, with and without the options, because round_robin_gradients changes which part of the
    model a rank has."""
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "16", "--model", "mlp"]
    same += ["--optimizer", "adam", "--data.val_fraction", "0", "--trainer.limit_test_batches", "1"]
    two, three = (["--strategy", f"deepspeed_stage_{stage}", "--max_steps"] for stage in (2, 3))
    train_all(
        {
            tmp_path / "plain": [*same, *two, "6"],
            tmp_path / "stage 3": [*same, *three, "6", *STAGE_3],
            tmp_path / "before": [*same, *two, "2"],
            tmp_path / "on": [*same, *two, "3", *STAGE_2, "--resume", str(tmp_path / "before")],
            tmp_path / "still on": [*same, *two, "4", *STAGE_2, "--resume", str(tmp_path / "on")],
            tmp_path / "off": [*same, *two, "6", "--resume", str(tmp_path / "still on")],
        }
    )
    plain = last_weights(tmp_path / "plain")
    for name in ("stage 3", "off"):
        assert largest_difference(last_weights(tmp_path / name), plain) == 0, name
