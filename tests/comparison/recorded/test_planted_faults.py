"""Faults planted into DeepSpeed and torch on two real ranks: the acceptance finds each at its first step, with its
tensor. `make test` plants one, `make fuzz` all."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.helpers import ROOT, of_make_fuzz, run_program
from tests.support.planted_faults import SITE, STEP

pytestmark = pytest.mark.distributed

FAULTS = {
    "gradients_halved": r"step 1: gradient of net\..*; the gradients of \d+ of \d+ tensors are 0.5 of the reference's",
    "micro_batch_lost": r"step 1: gradient of net\..*; no common factor",
    "all_reduce_left_out": rf"step {STEP}: gradient of net\.",
    "stale_state_of_one_shard": rf"step {STEP + 1}: update of net\.",
    "clipping_by_the_local_norm": r"step 1: update of net\.",
    "tied_weight_updated_on_one_side": r"step 1: initial net\.second\.weight",
    "weight_decay_on_all": r"step 1: update of net\.",
    "learning_rate_one_step_late": r"step 2: update of net\.",
}
"""What the first case that does not pass says, by the fault."""


@pytest.mark.parametrize(
    "fault", [name if name == "micro_batch_lost" else pytest.param(name, marks=of_make_fuzz) for name in FAULTS]
)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(SITE.format(name=fault))
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "CUDA_VISIBLE_DEVICES": ""}
    quick = [] if fault == "weight_decay_on_all" else ["--quick"]  # with AdamW
    flags = ["--acceptance", *quick, "--strategies", "deepspeed_stage_1", "--devices", "2", "--out", str(tmp_path)]
    done = run_program("compare", *flags, "--junit", str(tmp_path / "junit.xml"), env=environment)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    comparison = json.loads((tmp_path / "acceptance" / "version_0" / "comparison.json").read_text())
    remarks = [each["verdict"]["remark"] for each in comparison["variants"] if each["verdict"]["kind"] == "different"]
    assert any(re.match(FAULTS[fault], remark) for remark in remarks), remarks
    alone = [each for each in comparison["variants"] if each["world_size"] == 1]  # where nothing is planted
    assert all(each["verdict"]["kind"] in ("bit-identical", "within rounding") for each in alone)
    assert 'failures="' in (tmp_path / "junit.xml").read_text()
