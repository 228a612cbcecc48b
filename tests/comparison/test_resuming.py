"""Tests trainings that are saved after a step and continued in new processes, on one and two real ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.helpers import ROOT, WHOLE, of_test_all

CODE = ROOT / "tests" / "users_code"
DIGITS = ["--module", f"{CODE / 'own_code.py'}:Digits", "--datamodule", f"{CODE / 'own_code.py'}:DigitsData"]
DIGITS += ["--datamodule.batch_size", "4", "--accumulate", "4", "--max_steps", "6", "--devices", "2"]
"""Trains a module with Adam, a schedule by epochs, batch norm, dropout and a frozen layer. An epoch has four steps."""


@pytest.fixture
def resumed(compared: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs the command and returns the variants by name."""

    def run(*flags: str, fault: str = "") -> dict[str, Any]:
        _, comparison = compared(*flags, fault=fault)
        return {variant["name"]: variant for variant in comparison["variants"]}

    return run


def remark(variants: dict[str, Any], name: str) -> str:
    assert variants[name]["kind"] == "different", variants[name]
    return variants[name]["remark"]


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["deepspeed_stage_2", pytest.param("ddp", marks=of_test_all)])
def test_a_module_resumes_under_other_strategies_and_ranks(strategy: str, resumed: Callable[..., Any]):
    """The module's optimizers have no names of parameters, so that a checkpoint of DDP has none either."""
    variants = resumed(
        *(*DIGITS, "--strategies", strategy, "--resume_at", "4"),
        *("--resume_under", "deepspeed_stage_3", "--resume_devices", "1", *(["2"] if WHOLE else [])),
    )
    continued = [variant for name, variant in variants.items() if "resumed at step 4" in name]
    assert len(continued) == (3 if WHOLE else 2)
    for variant in continued:
        assert variant["kind"] in ("bit-identical", "within rounding"), variant["remark"]
        assert variant["check"]["steps"] == [5, 6]
        judged = variant["check"]["tallies"]
        assert judged["batch"]["judged"] == 2
        assert {"position", "learning rate", "state", "weight", "buffer"} <= judged.keys()


@of_test_all
@pytest.mark.distributed
def test_a_loader_that_begins_again_in_mid_epoch_is_named(resumed: Callable[..., Any]):
    variants = resumed(*DIGITS, "--strategies", "deepspeed_stage_2", "--resume_at", "3")
    assert re.match(
        r"step 4: batch: it is the batch of step 1: Lightning restores .*; "
        "the first step starts from exactly the saved values$",
        remark(variants, "deepspeed_stage_2, resumed at step 3"),
    )


@of_test_all
@pytest.mark.distributed
@pytest.mark.parametrize("module", ["Encoder", "LoRA"])
def test_tied_and_frozen_weights_resume_as_they_were(module: str, resumed: Callable[..., Any]):
    """In bfloat16, DeepSpeed's checkpoint has a tied weight twice, once in float32 and once rounded."""
    flags = ["--module", f"{CODE / 'own_modules.py'}:{module}", "--precision", "bf16-mixed", "--devices", "2"]
    flags += ["--strategies", "deepspeed_stage_2", "deepspeed_stage_3", "--max_steps", "6", "--resume_at", "5"]
    under = ["ddp"] if module == "Encoder" else ["deepspeed_stage_1"]
    variants = resumed(*flags, "--resume_under", *under)
    continued = [name for name in variants if "resumed" in name]
    assert len(continued) == 4
    for name in continued:
        assert remark(variants, name).endswith("starts from exactly the saved values"), "the loader begins again"


FAULTS = {
    "optimizer_state_not_restored": r"step 4: state of exp_avg of \S+ off by 100 %",
    "schedule_position_lost": r"step 4: position of last_epoch off by 100 % .*; it is 0 instead of 1",
    "learning_rate_of_the_epoch_before": r"step 4: learning rate of \S+ off by .*; it is 0\.01 instead of 0\.001",
}
"""Faults that are planted into the loading of ZeRO 2, torch and DeepSpeed, each with the text of the verdict."""


@of_test_all
@pytest.mark.distributed
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, resumed: Callable[..., Any]):
    variants = resumed(*DIGITS, "--strategies", "deepspeed_stage_2", "--resume_at", "4", fault=fault)
    assert variants["deepspeed_stage_2"]["kind"] == "within rounding"
    assert re.match(FAULTS[fault], remark(variants, "deepspeed_stage_2, resumed at step 4"))
