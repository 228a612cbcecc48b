"""Checks that DeepSpeed counts no step of its own before the first step under ZeRO in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.helpers import last_weights, of_test_all, train_all

RATE = 0.01


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=of_test_all)])
def test_the_first_step_moves_a_bias_by_the_learning_rate(stage: int, small_data: list[str], tmp_path: Path) -> None:
    flags = ["--strategy", f"deepspeed_stage_{stage}", "--precision", "bf16-mixed", "--accelerator", "cpu"]
    flags += ["--optimizer", "adamw", "--optimizer.lr", str(RATE), "--init", "he"]  # with biases of 0
    train_all({tmp_path: [*small_data, *flags, "--devices", "1", "--max_steps", "1", "--data.val_fraction", "0"]})
    assert last_weights(tmp_path)["fc3.bias"].abs().tolist() == pytest.approx([RATE] * 10, rel=0.01)
