"""Tests users' LightningModules under every strategy, on one and two real ranks."""

from __future__ import annotations

import json
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


NEEDS_VOCAB = """
class Base(LightningModule):
    def __init__(self, vocab, width=4):
        super().__init__()

class GPT(Base):
    def __init__(self, depth=2, **options):
        super().__init__(**options)
"""


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


def test_an_epoch_need_not_be_whole_steps_if_the_run_ends_before(tmp_path: Path):
    """The loader has 16 batches, and 4 steps take 12."""
    (case,) = own_module.plan(["baseline"], 1, ["3"], [*OWN, "--max_steps", "4"])
    check = StepCheck(every=1, on_fault="warn")
    own_module.train_module(case.flags, tmp_path, check)
    assert check.verdict.steps == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("class GPT(nn.Module): pass", [], "--module: GPT is not a LightningModule: derive it from lightning.pytorch"),
        ("GPT = 3", [], "--module: 3 is not a LightningModule"),
        ("class GPT(LightningDataModule): pass", [], "GPT is not a LightningModule"),
        (f"{NEEDS_VOCAB}", [], "--module.vocab is required"),
        (f"{NEEDS_VOCAB}\nclass GPT(Base): pass", [], "--module.vocab is required"),
        (f"{NEEDS_VOCAB}", ["--module.vocb", "3"], "--module.vocb is not an argument of"),
        (f"{NEEDS_VOCAB}", ["--module.vocab", "3"], "--module has no train_dataloader"),
    ],
)
def test_a_class_that_cannot_be_trained_is_refused(text: str, options: list[str], expected: str, tmp_path: Path):
    file = tmp_path / "gpt.py"
    file.write_text(f"from torch import nn\nfrom lightning.pytorch import *\n{text}\n")
    with pytest.raises(UsageError, match=re.escape(expected)):
        own_module.plan(["ddp"], 1, [], ["--module", f"{file}:GPT", *options])


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
    assert given.options["module.lr"] == "0.3", "the command line overrides the file"
    assert given.files[str(file)] == {"module": {"lr": 0.02}, "datamodule": {"batch_size": 4}}
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


@pytest.mark.parametrize(
    ("content", "batch", "accumulate"),
    [
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 16, 2),
        ({"train_batch_size": 64, "gradient_clipping": 0.5}, 2, 1),
    ],
)
def test_the_maths_of_a_deepspeed_configuration(content: dict[str, Any], batch: int, accumulate: int, tmp_path: Path):
    """The micro-batch is given to DeepSpeed, but the module's loader decides."""
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(content))
    (case,) = own_module.plan([str(file)], 2, [], OWN)
    run = own_module.resolved(case.flags)
    assert (run.recipe.batch_size, run.placement.accumulate) == (batch, accumulate)
    assert run.recipe.gradient_clip_val == content.get("gradient_clipping", 0.0)


@pytest.mark.parametrize("key", ["optimizer", "scheduler"])
def test_a_deepspeed_configuration_may_not_replace_the_modules_optimizer(key: str, tmp_path: Path):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({key: {"type": {"optimizer": "AdamW", "scheduler": "WarmupLR"}[key], "params": {}}}))
    with pytest.raises(UsageError, match=f"its {key} would replace the module's configure_optimizers: remove {key}"):
        own_module.plan(["baseline", str(file)], 2, [], OWN)
