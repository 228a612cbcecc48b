"""Plants faults into DeepSpeed and torch on two real ranks. The acceptance must find each fault at its first step, and
name the tensor. `make test` plants one fault, and `make test-all` plants all."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from cifar_zero.comparison.cases import plan_cases
from tests.comparison.planted_faults import STEP
from tests.support.helpers import of_test_all

pytestmark = pytest.mark.distributed

FAULTS = {
    "gradients_halved": ("1", r"step 1: gradient of net\..*; it is 0\.5\d* times the correct value"),
    "micro_batch_lost": ("1", r"step 1: gradient of net\..*; the outputs of all modules are correct"),
    "bfloat16_gradients_scaled": ("2", r"step 1: gradient of net\..*; it is 1\.2\d* times the correct value"),
    "bfloat16_micro_batch_lost": ("2", r"step 1: gradient of net\."),
    "bfloat16_decay_dropped": ("2", r"step 1: update of net\."),
    "bfloat16_faint_gradient_lost": ("2", r"step 1: gradient of net\.faint\.weight"),
    "all_reduce_left_out": ("1", rf"step {STEP}: gradient of net\."),
    "bucket_not_reduced": ("2", r"step 1: gradient of net\."),
    "shard_changed_at_release": ("3", r"step 1: (gradient|weight) of net\."),
    "stale_weights_of_one_rank": ("1", rf"step {STEP}: weight of net\..*; on rank 1"),
    "stale_state_of_one_shard": ("1", rf"step {STEP}: state of momentum_buffer of net\..*; on rank 1"),
    "dead_partition": ("1", rf"step {STEP}: update of net\..*; on rank 1"),
    "clipping_by_the_local_norm": ("1", r"step 1: update of net\."),
    "tied_weight_updated_on_one_side": ("1", r"step 1: (gradient|weight) of net\."),
    "weight_decay_on_all": ("1", r"step 1: option of net\..*: weight_decay is "),
    "learning_rate_one_step_late": ("1", r"step 2: update of net\."),
    "module_changed_at_the_start": ("2", r"step 1: .*; the first module whose output differs is net\.head"),
    "batch_norm_put_into_evaluation": (
        "2",
        r"step 0: training mode of net\.conv_norm: the start of the strategy stops its",
    ),
    "batch_norm_never_updated": ("2", r"step 1: buffer of net\."),
}
"""For each fault, the ZeRO stage under which it is planted, and the text of a case that does not pass."""

SLOW = {"bucket_not_reduced", "shard_changed_at_release", "learning_rate_one_step_late"}
"""Faults that need the whole acceptance, because the rows of --quick do not execute the code."""


@pytest.mark.parametrize(
    "fault", [name if name == "micro_batch_lost" else pytest.param(name, marks=of_test_all) for name in FAULTS]
)
def test_a_planted_fault_is_found_and_no_case_is_left_out(fault: str, compared: Callable[..., Any]):
    stage, expected = FAULTS[fault]
    strategy, quick = f"deepspeed_stage_{stage}", fault not in SLOW
    flags = ["--acceptance", *(["--quick"] if quick else []), "--strategies", strategy, "--devices", "2"]
    code, comparison = compared(*flags, fault=fault)
    cases = comparison["variants"]
    assert code == 1
    assert {case.name for case in plan_cases([strategy], 2, quick)} <= {case["name"] for case in cases}
    assert not [case["name"] for case in cases if "before it was trained" in case["remark"]]
    remarks = [case["remark"] for case in cases if case["kind"] == "different"]
    assert any(re.match(expected, remark) for remark in remarks), remarks
