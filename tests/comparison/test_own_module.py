"""Tests users' LightningModules under every strategy, on one and two real ranks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch import LightningModule

from cifar_zero.comparison import assert_agrees, own_module
from cifar_zero.config.user_classes import read_given
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count
from tests.support.helpers import ROOT, of_test_all, run_program, wait_until
from tests.users_code.own_code import Alone, Digits, DigitsData, Words
from tests.users_code.own_modules import MODULES

FILE = ROOT / "tests" / "users_code" / "own_code.py"
OWN = ["--module", f"{FILE}:Digits", "--datamodule", f"{FILE}:DigitsData"]


@of_test_all
@pytest.mark.distributed
def test_the_command_in_another_directory(tmp_path: Path):
    """The module has Adam with a schedule, an LSTM, dropout, batch norm and a frozen layer. It trains on shuffled data
    with four micro-batches per step. Without GPUs there are two CPU ranks."""
    (tmp_path / "mine.py").write_bytes(FILE.read_bytes())
    flags = ["--module", "mine.py:Digits", "--datamodule", "mine.py:DigitsData", "--module.lr", "0.02"]
    flags += ["--datamodule.batch_size", "4", "--accumulate", "4", "--max_steps", "6"]
    names = ["deepspeed_stage_1", "deepspeed_stage_3", "fsdp2"]
    done = run_program("compare", *flags, "--strategies", *names, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = tmp_path.glob("comparisons/mine.py-Digits/*/comparison.json")
    variants = json.loads(file.read_text())["variants"]
    assert [variant["name"] for variant in variants] == names
    assert {variant["world_size"] for variant in variants} == {gpu_count() or 2}
    assert {variant["kind"] for variant in variants} <= {"bit-identical", "within rounding"}


@pytest.mark.distributed
def test_ctrl_c_reaches_the_ranks(tmp_path: Path):
    """The launcher blocks SIGINT in a rank until the program handles it."""
    command = [sys.executable, "-m", "cifar_zero", "compare", *OWN, "--max_steps", "100000", "--out", str(tmp_path)]
    with subprocess.Popen([*command, "--devices", "2", "--strategies", "ddp"], cwd=ROOT) as process:
        wait_until(lambda: any(log.stat().st_size for log in tmp_path.rglob("2-ranks-0.log")))  # the ranks train
        started = psutil.Process(process.pid).children(recursive=True)
        states = [Path(f"/proc/{each.pid}/status").read_text() for each in started]
        for each in [*started, process]:
            each.kill()
    assert len(states) >= 3  # the process that starts the ranks, and these
    blocked = [int(re.findall(r"SigBlk:\s+(\w+)", state)[0], 16) for state in states]
    assert not any(signals >> (signal.SIGINT - 1) & 1 for signals in blocked)


@of_test_all
@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("module", MODULES)
def test_modules_as_people_have_them(module: type[LightningModule], precision: str):
    names = ["ddp", "deepspeed_stage_2", "deepspeed_stage_3"]
    assert_agrees(module, strategies=names, devices=2, steps=6, precision=precision)


@pytest.mark.parametrize("module", [Alone, pytest.param(Words, marks=of_test_all)])
def test_demos_of_lightning_with_their_own_loader(module: type[LightningModule]):
    assert_agrees(module, strategies=["deepspeed_stage_2", "deepspeed_stage_3_offload", "deepspeed_stage_0"], steps=4)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"accumulate": 3}, "--accumulate 3 does not divide the 16 batches of an epoch"),
        ({"module_options": {"manual": True}}, "--module uses manual optimization: DeepSpeed steps its only optimizer"),
        pytest.param(
            {"module_options": {"optimizers": 2}}, "--module has several optimizers: DeepSpeed steps", marks=of_test_all
        ),
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
