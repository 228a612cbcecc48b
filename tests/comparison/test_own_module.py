"""Tests users' LightningModules under every strategy, on one and two real ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from cifar_zero.comparison import StepCheck, assert_agrees, own_module
from cifar_zero.config.user_classes import read_given
from cifar_zero.core.errors import UsageError
from tests.support.helpers import ROOT, WHOLE, of_test_all, on_ranks
from tests.users_code.own_code import Alone, Digits, DigitsData
from tests.users_code.own_modules import MODULES, Encoder, OwnParameters

FILE = ROOT / "tests" / "users_code" / "own_code.py"
OWN = ["--module", f"{FILE}:Digits", "--datamodule", f"{FILE}:DigitsData"]


@of_test_all
@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("module", MODULES)
def test_modules_as_people_have_them(module: type[LightningModule], precision: str):
    names = ["ddp", "deepspeed_stage_2", "deepspeed_stage_3"]
    assert_agrees(module, strategies=names, devices=2, steps=6, precision=precision)


def train_under_fsdp2(folder: str, precision: str) -> None:
    for module in MODULES if WHOLE else (Encoder, OwnParameters):
        flags = ["--module", f"{module.__module__}:{module.__name__}", "--max_steps", "4", "--accumulate", "2"]
        flags += ["--strategy", "fsdp2", "--devices", "2", "--accelerator", "cpu", "--precision", precision]
        check = StepCheck(every=1)
        own_module.train_module(flags, Path(folder), check)
        assert check.verdict.outcome in ("bit-identical", "within rounding"), (module, str(check.verdict))
        assert check.verdict.steps == [1, 2, 3, 4]


@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_modules_as_people_have_them_under_fsdp2(precision: str, tmp_path: Path):
    on_ranks(2, train_under_fsdp2, str(tmp_path), precision)


@of_test_all
@pytest.mark.distributed
def test_a_module_with_a_data_module_under_fsdp2():
    assert_agrees(Digits, DigitsData, strategies=["fsdp2"], devices=2, steps=6, accumulate=4)


def test_a_demo_of_lightning_with_its_own_loader():
    assert_agrees(Alone, strategies=["deepspeed_stage_2", "deepspeed_stage_3_offload", "deepspeed_stage_0"], steps=4)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"accumulate": 3}, "does not divide the 16 batches of an epoch. Plain PyTorch would make a smaller step"),
        pytest.param({"module_options": {"manual": True}}, "--module uses manual optimization", marks=of_test_all),
        pytest.param({"module_options": {"optimizers": 2}}, "--module has several optimizers", marks=of_test_all),
    ],
)
def test_what_no_strategy_can_train_is_refused_at_the_first_training(options: dict[str, Any], refused: str):
    with pytest.raises(UsageError, match=refused):
        assert_agrees(Digits, DigitsData, strategies=["deepspeed_stage_1", "ddp"], **options)


CLI = """
trainer: {max_epochs: 3, precision: bf16-mixed, accumulate_grad_batches: 2, gradient_clip_val: 0.5, callbacks: null}
model: {class_path: mine.Digits, init_args: {lr: 0.02}}
data: {batch_size: 4}
"""


def test_a_configuration_of_lightning_cli_gives_arguments_and_maths(tmp_path: Path):
    file = tmp_path / "cli.yaml"
    file.write_text(CLI)
    (case,) = own_module.plan(["deepspeed_stage_2"], 1, [], [*OWN, "--config", str(file), "--module.lr", "0.3"])
    given = read_given(case.flags)
    assert given.theirs["module.lr"] == "0.3", "the command line overrides the file"
    assert given.theirs["datamodule.batch_size"] == "4"
    run = own_module.resolved(case.flags)
    placement = run.placement
    assert (placement.precision, placement.accumulate, run.recipe.gradient_clip_val) == ("bf16-mixed", 2, 0.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {foo: 3}", "--module.foo is not an argument of"),
        ("optimizer: {class_path: torch.optim.SGD}", "optimizer would replace configure_optimizers"),
        ("model: {lr: {class_path: os.system}}", "class_path, which names code"),
        ("model: {norm: evil.Code}", "--module.norm in a file may not name code"),
        ("model: [1]", "model is not a section with options"),
        ("trainer: {precision: 17}", "precision"),
        ("model: [", "cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_taken_is_refused(text: str, expected: str, tmp_path: Path):
    file = tmp_path / "cli.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(expected)):
        own_module.plan(["deepspeed_stage_2"], 1, [], [*OWN, "--config", str(file)])
