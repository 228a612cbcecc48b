"""Tests that --log_gradients gives the same curves under every strategy."""

import math
from pathlib import Path

import pytest

from cifar_zero import models
from tests.support.helpers import WHOLE, curve, train_all

pytestmark = pytest.mark.distributed

STRATEGIES = ["ddp", "deepspeed_stage_3", *(["deepspeed_stage_1", "fsdp2"] if WHOLE else [])]


def test_equal_under_every_strategy(tmp_path: Path, small_data: list[str]):
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "32", "--accumulate", "2"]
    same += ["--log_gradients", "--log_interval", "3", "--gradient_clip_val", "0.05", "--max_steps", "6"]
    # The learning rate is so small that float32 rounds every update to 0, so all strategies have the same weights.
    same += ["--optimizer.lr", "1e-12", "--trainer.limit_test_batches", "1"]
    train_all({tmp_path / name: [*same, "--strategy", name] for name in STRATEGIES})
    norms = [f"grad_norm/{name}" for name, _ in models.build("net", 10).named_parameters()]
    expected = {tag: curve(tmp_path / "ddp", tag) for tag in norms}
    columns = zip(*(expected[tag].values() for tag in norms), strict=True)
    for norm, of_parameters in zip(curve(tmp_path / "ddp", "train/grad_norm").values(), columns, strict=True):
        assert math.hypot(*of_parameters) == pytest.approx(norm, rel=1e-4)
    for name in STRATEGIES:
        for tag, values in expected.items():
            assert curve(tmp_path / name, tag) == pytest.approx(values, rel=1e-3, abs=0), f"{name}, {tag}"
