"""Tests that ZeRO's options for buckets, prefetching and memory do not change a bit of the weights, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.helpers import largest_difference, last_weights, train_all

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def same(small_data: list[str]) -> list[str]:
    flags = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "16", "--model", "mlp"]
    flags += ["--optimizer.lr", "0.05", "--data.val_fraction", "0"]
    return [*flags, "--trainer.limit_test_batches", "1", "--max_steps"]


SMALL = ["--zero.reduce_bucket_size", "1000"]
STAGE_2 = [*SMALL, "--zero.round_robin_gradients", "true"]
STAGE_3 = [*SMALL, "--zero.prefetch_bucket_size", "0", "--zero.max_live_parameters", "0"]
STAGE_3 += ["--zero.param_persistence_threshold", "0"]


def test_buckets_prefetching_and_the_order_of_the_gradients(same: list[str], tmp_path: Path):
    """Runs also resume with and without the options, because round_robin_gradients changes which part of the model a
    rank has."""
    two, three = (["--strategy", f"deepspeed_stage_{stage}"] for stage in (2, 3))
    adam = ["--optimizer", "adam", "--optimizer.lr", "0.001"]
    train_all(
        {
            tmp_path / "plain": [*same, "6", *two, *adam],
            tmp_path / "half": [*same, "3", *two, *adam],
            tmp_path / "half switched": [*same, "3", *two, *STAGE_2, *adam],
            tmp_path / "stage 3": [*same, "6", *three, *STAGE_3, *adam],
        }
    )
    resumed = {name: ["--resume", str(tmp_path / name)] for name in ("half", "half switched")}
    train_all(
        {
            tmp_path / "on": [*same, "6", *two, *adam, *STAGE_2, *resumed["half"]],
            tmp_path / "off": [*same, "6", *two, *adam, *resumed["half switched"]],
            tmp_path / "both": [*same, "6", *two, *adam, *STAGE_2, *resumed["half switched"]],
        }
    )
    plain = last_weights(tmp_path / "plain")
    for name in ("stage 3", "on", "off", "both"):
        assert largest_difference(last_weights(tmp_path / name), plain) == 0, name
