"""Tests cifar-zero plan, started as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cifar_zero.core import exits
from cifar_zero.core.console import command
from cifar_zero.planning import plan
from tests.support.helpers import ROOT, assert_ok, run_program

CODE = ROOT / "tests" / "users_code" / "own_code.py"


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
    code = "import pathlib, sys; from cifar_zero.planning.plan import main; main()\n"
    # On Linux, ru_maxrss would be the value of pytest, from which the process was forked.
    code += "print(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0], file=sys.stderr)"
    done = run_program("-c", code, *flags)
    assert_ok(done)
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
    (tmp_path / "mine.py").write_bytes(CODE.read_bytes())
    flags = ["--module", "mine.py:Digits", "--datamodule", "mine.py:DigitsData", "--module.lr", "0.02"]
    flags += ["--datamodule.batch_size", "4", "--devices", "2", "--accelerator", "cpu"]
    done = run_program("plan", *flags, "--json", cwd=tmp_path)
    assert_ok(done)
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
class Fails(Own):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(24, 10)
    def training_step(self, batch, batch_idx):
        raise ValueError("no good")
"""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--module own.py:Fails --accelerator cpu", "--module: own.py, line 9: ValueError: no good"),
        (f"--module {CODE}:Digits --datamodule {CODE}:DigitsData --module.manual true", "uses manual optimization"),
        ("--device_memry 80GB", "unknown option --device_memry"),
        ("--device_memory 80PB", "--device_memory 80PB: give a size such as 80GB"),
        ("--device_memory=", "--device_memory : give a size such as 80GB"),
        ("--host_memory 1e-10", "--host_memory 1e-10: give a size"),
        (f"--ds_config {ROOT}/cifar_zero/config/deepspeed_examples.json", "--ds_config cannot be planned"),
        ("--model vit_tiny --trainable nothing.*", "--trainable nothing.* matches no parameter of"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    planned, flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    code, out, err = planned(*flags.split())
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line
