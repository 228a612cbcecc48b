"""compare.py --acceptance on two real ranks, where ZeRO 2 loses a micro-batch."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from cifar_zero.comparison.recorded.cases import recipes
from tests.support.helpers import assert_ok, run_program

LOST_MICRO_BATCH = """
import os

if "RANK" in os.environ:
    from deepspeed.runtime.engine import DeepSpeedEngine

    backward = DeepSpeedEngine.backward

    def broken(self, loss, *args, **options):
        lost = self.zero_optimization_stage() == 2 and self.micro_steps % 4 == 1
        return backward(self, 0 * loss if lost else loss, *args, **options)

    DeepSpeedEngine.backward = broken
"""


@pytest.mark.distributed
def test_a_lost_micro_batch_is_found(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(LOST_MICRO_BATCH)
    flags = ["--acceptance", "--quick", "--strategies", "deepspeed_stage_1", "deepspeed_stage_2", "--devices", "2"]
    junit = tmp_path / "acceptance.xml"
    where = ["--out", str(tmp_path), "--junit", str(junit)]
    done = run_program("compare.py", *flags, *where, env={"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1, done.stderr
    comparison = json.loads((tmp_path / "acceptance" / "version_0" / "comparison.json").read_text())
    found = {(each["strategy"], each["accumulate"]): each["verdict"] for each in comparison["variants"]}
    assert len(found) == 4
    assert found["deepspeed_stage_1", 4]["kind"] in ("bit-identical", "within rounding")
    assert found["deepspeed_stage_1", 1]["kind"] in ("bit-identical", "within rounding")
    assert found["deepspeed_stage_2", 4]["kind"] == "different"
    assert found["deepspeed_stage_2", 4]["first_parting"] == 1
    assert found["deepspeed_stage_2", 4]["remark"].startswith("step 1: gradient of net.")
    assert 'failures="2"' in junit.read_text() or 'failures="1"' in junit.read_text()


def test_the_cases_are_listed():
    done = run_program("compare.py", "--acceptance", "--print_cases", "--strategies", "deepspeed_stage_3", "ddp")
    assert_ok(done)
    lines = done.stdout.splitlines()
    assert any(line.startswith("deepspeed_stage_3, torture, sgd, 32-true, 2 ranks, accumulate 4") for line in lines)


def test_another_flag_is_refused():
    done = run_program("compare.py", "--acceptance", "--max_steps", "5")
    assert done.returncode == 2
    assert "--acceptance trains cases of its own" in done.stderr


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_each_pair_of_settings_occurs(ranks: int):
    precisions = ("32-true", "bf16-mixed", "16-mixed")
    rows = recipes(ranks, precisions)
    assert len(rows) <= 10
    found = {pair for row in rows for pair in combinations(row.items(), 2)}
    for precision in precisions:
        for model in ("net", "torture"):
            assert (("precision", precision), ("model", model)) in found
    assert (("ranks", ranks), ("accumulate", 4)) in found
    assert (("accumulate", 4), ("precision", "bf16-mixed")) in found
