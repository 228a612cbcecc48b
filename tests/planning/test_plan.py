"""Tests cifar-zero plan, started as a user starts it."""

import json

import pytest

from cifar_zero.core import exits
from cifar_zero.core.console import command
from cifar_zero.planning import plan
from tests.support.helpers import ROOT, assert_ok, run_program


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
    assert "--devices 8" in said["command"]
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


@pytest.mark.parametrize("flags", [(), ("--device_memory", "8GB")])
def test_a_printed_command_trains_on_the_planned_ranks(flags: tuple[str, ...], planned):
    """On a CPU, --devices auto of the command could be another number."""
    _, out, _ = planned("--accelerator", "cpu", "--model", "net_moe", "--model.ep_size", "2", *flags)
    assert out.splitlines()[-1].endswith("--devices 2"), out


@pytest.mark.parametrize("model", ["Indexed", "Counted"])
def test_a_model_that_uses_its_blocks_in_its_own_way_is_planned(model: str, planned):
    code, out, err = planned("--model", f"{ROOT}/tests/users_code/own_code.py:{model}", "--device_memory", "8GB")
    assert (code, err) == (0, "")
    assert "recommended" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--device_memry 80GB", "unknown option --device_memry"),
        ("--device_memory 80PB", "--device_memory 80PB: give a size such as 80GB"),
        ("--device_memory=", "--device_memory : give a size such as 80GB"),
        ("--host_memory 1e-10", "--host_memory 1e-10: give a size"),
        (f"--ds_config {ROOT}/cifar_zero/config/deepspeed_examples.json", "--ds_config cannot be planned"),
        (f"--model {ROOT}/tests/users_code/own_code.py:Small", "what it computes depends on values"),
        ("--model vit_tiny --trainable nothing.*", "--trainable nothing.* matches no parameter of"),
    ],
)
def test_a_mistake_is_reported_in_one_line(planned, flags: str, message: str):
    code, out, err = planned(*flags.split())
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line
