"""Tests cifar-zero plan, started as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cifar_zero.core import exits
from cifar_zero.core.console import command
from cifar_zero.planning import plan
from tests.support.helpers import ROOT, run_program

USERS_CODE = ROOT / "tests" / "users_code"
CODE, MODULES = USERS_CODE / "own_code.py", USERS_CODE / "own_modules.py"
CPU = ("--accelerator", "cpu", "--devices", "2")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Returns a function that runs cifar-zero plan in this process and returns exit code, output and errors."""

    def run(*flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["plan", *flags])
        code = exits.guarded(plan.main)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_thirteen_billion_parameters_take_little_memory():
    """The peak memory of the process is 0.84 GB, mostly used by torch. The weights alone would take 52 GB."""
    flags = ["--model", "vit_13b", "--devices", "8", "--device_memory", "80GB", "--optimizer", "adamw", "--json"]
    code = "import pathlib, runpy, sys\n"
    code += "try: runpy.run_module('cifar_zero', run_name='__main__')\n"
    # On Linux, ru_maxrss would be the value of pytest, from which the process was forked.
    code += (
        "finally: print(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["parameters"] == 12_900_853_770
    assert said["recommended"] == "deepspeed_stage_3"
    assert said["command"].endswith("--strategy deepspeed_stage_3")
    assert int(done.stderr.split()[-1]) * 1024 < 2e9


def test_the_table_of_strategies(planned):
    code, out, _ = planned("--model", "vit_tiny", "--devices", "2", "--device_memory", "80GB", "--batch_size", "64")
    assert code == 0
    assert (
        "vit_tiny, 5,362,378 parameters (5,362,378 trained), sgd, 32-true, micro-batches of 32 on each of 2 ranks"
        in out
    )
    assert out.endswith(
        "baseline needs 0.38 of the 72.00 GB available to a rank\n"
        f"{command('train')} --model vit_tiny --devices 2 --batch_size 64 --strategy baseline\n"
    )
    assert len([line for line in out.splitlines() if " yes " in line]) == 11


def test_the_command_for_a_users_module(tmp_path: Path) -> None:
    """The module has Adam, batch norm and a frozen layer. The LSTM's activations are counted without the kernel's
    workspace."""
    (tmp_path / "mine.py").write_bytes((USERS_CODE / "own_code.py").read_bytes())
    flags = ["--module", "mine.py:Digits", "--datamodule", "mine.py:DigitsData", "--module.lr", "0.02"]
    flags += ["--datamodule.batch_size", "4", "--devices", "2", "--accelerator", "cpu"]
    done = run_program("plan", *flags, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said = json.loads(done.stdout)
    parameters, trained = 1_738, 1_594
    assert (said["parameters"], said["trained_parameters"], said["micro_batch"]) == (parameters, trained, 4)
    assert said["command"] == command("compare", *flags, "--strategies", "baseline")
    states = {need["strategy"]: need["states"]["device"] for need in said["strategies"]}
    half, adam = trained // 2, 2
    assert states["baseline"] == {"parameters": 4 * parameters, "gradients": 4 * trained, "optimizer": 8 * trained}
    sharded = {"gradients": 4 * half, "optimizer": 4 * (1 + adam) * half}
    assert states["deepspeed_stage_2"] == {"parameters": 4 * parameters, **sharded}
    # Every parameter is small enough to be kept whole, in addition to the shard.
    assert states["deepspeed_stage_3"] == {"parameters": 4 * (parameters + parameters // 2), **sharded}


OWN = """
import torch
from tests.users_code.own_modules import Own
class Wide(Own):
    def __init__(self, width: int = 10):
        super().__init__()
        self.net = torch.nn.Linear(24, width)
class Fails(Wide):
    def training_step(self, batch, batch_idx):
        raise ValueError("no good")
"""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--module", "OWN:Fails"], "--module: own.py, line 10: ValueError: no good"),
        (["--module", "OWN:Missing"], "own.py has no Missing"),
        (["--module", "OWN:Wide", "--module.width", "wide"], "--module.width: expected int, not wide"),
        (["--module", "OWN:Wide", "--batch_size", "4"], "--batch_size does not work with --module: set it in"),
        (["--module", f"{CODE}:Digits"], "--module has no train_dataloader"),
        (
            ["--module", f"{CODE}:Digits", "--datamodule", f"{CODE}:DigitsData", "--module.manual", "true"],
            "--module uses manual optimization",
        ),
    ],
)
def test_a_mistake_in_a_users_module_is_one_line(planned, flags: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    code, out, err = planned(*(flag.replace("OWN", f"{tmp_path}/own.py") for flag in flags), *CPU)
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model vit_lage", "unknown model 'vit_lage': did you mean vit_large?"),
        ("--device_memry 80GB", "unknown option --device_memry"),
        ("--devices 3 --batch_size 64", "use --batch_size 63 or 66"),
        ("--device_memory 80PB", "--device_memory 80PB: give a size such as 80GB"),
        ("--device_memory=", "--device_memory : give a size such as 80GB"),
        ("--host_memory 1e-10", "--host_memory 1e-10: give a size"),
        ("--lora.rank 4", "--lora.rank needs --lora.target"),
        ("--ds_config cifar_zero/config/deepspeed_examples.json", "--ds_config cannot be planned"),
        ("--model vit_tiny --trainable nothing.*", "--trainable nothing.* matches no parameter of"),
    ],
)
def test_a_mistake_is_reported_in_one_line(planned, flags: str, message: str):
    code, out, err = planned(*flags.split())
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line
