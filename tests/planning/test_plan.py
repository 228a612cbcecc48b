"""cifar-zero plan, started as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cifar_zero.core import exits
from cifar_zero.core.console import command, torchrun
from cifar_zero.planning import plan
from tests.support.helpers import ROOT, run_program


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs cifar-zero plan in this process; returns the exit code, the output and the errors."""

    def run(*flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["plan", *flags])
        code = exits.guarded(plan.main)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_thirteen_billion_parameters_take_little_memory() -> None:
    """The process peaks at 0.84 GB, most of it torch's; the weights alone would take 52 GB."""
    flags = ["--model", "vit_13b", "--devices", "8", "--device_memory", "80GB", "--optimizer", "adamw", "--json"]
    code = "import pathlib, runpy, sys\n"
    code += "try: runpy.run_module('cifar_zero', run_name='__main__')\n"
    # Linux's ru_maxrss would be that of pytest, from which the process was forked.
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


def test_the_table_of_strategies(planned) -> None:
    code, out, _ = planned("--model", "vit_tiny", "--devices", "2", "--device_memory", "80GB", "--batch_size", "64")
    assert code == 0
    assert "vit_tiny, 5,362,378 parameters (5,362,378 trained), sgd, 32-true, micro-batches of 32 images" in out
    assert out.endswith(
        "baseline needs 0.38 of the 72.00 GB available to a rank\n"
        f"{command('train')} --model vit_tiny --devices 2 --batch_size 64 --strategy baseline\n"
    )
    assert len([line for line in out.splitlines() if " yes " in line]) == 11


def test_host_memory_is_the_memory_of_a_cpu(planned) -> None:
    _, out, _ = planned("--model", "net", "--accelerator", "cpu", "--devices", "2", "--host_memory", "4GB", "--json")
    assert json.loads(out)["room"]["device"] == json.loads(out)["room"]["host"] < 2e9


def test_several_nodes_are_started_by_torchrun(planned) -> None:
    code, out, _ = planned("--num_nodes", "2", "--devices", "4", "--device_memory", "80GB", "--batch_size", "8")
    assert code == 0
    assert out.splitlines()[-1].startswith(torchrun("train", 2, 4))


def test_what_this_machine_lacks_does_not_matter_for_another_one(planned, tmp_path: Path) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text("batch_size: 4\n")
    flags = ["--config", str(recipe), "--optimizer", "adam8bit", "--device_memory", "80GB"]
    code, out, _ = planned(*flags, "--json")
    assert code == 0
    assert json.loads(out)["micro_batch"] == 4  # the default, but given explicitly
    assert json.loads(out)["recommended"] == "baseline"


def test_nothing_fits(planned) -> None:
    code, out, _ = planned("--model", "vit_13b", "--device_memory", "1GiB", "--json")
    assert code == 1
    assert json.loads(out)["recommended"] is None
    assert json.loads(out)["reason"].startswith("nothing fits: deepspeed_stage_3_offload")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "vit_lage"], "unknown model 'vit_lage': did you mean vit_large?"),
        (["--devices", "3", "--batch_size", "64"], "the nearest that divide: 63 or 66"),
        (["--device_memory", "80PB"], "--device_memory 80PB: give a size such as 80GB"),
        (["--device_memry", "80GB"], "unknown option --device_memry"),
        (["--device_memory", ""], "--device_memory : give a size such as 80GB"),
        (["--host_memory", "1e-10"], "--host_memory 1e-10: give a size"),
        (["--lora.rank", "-1", "--lora.target", "fc1"], "--lora.rank must be at least 1, not -1"),
        (["--lora.rank", "4"], "--lora.rank needs --lora.target"),
        (["--precision", "16-mixed", "--accelerator", "cpu"], "--precision 16-mixed needs a GPU"),
        (["--ds_config", "cifar_zero/config/deepspeed_examples.json"], "--ds_config cannot be planned"),
        (
            ["--model", "vit_tiny", "--trainable", "nothing.*"],
            "--trainable nothing.* matches no parameter of",
        ),
    ],
)
def test_a_mistake_is_reported_in_one_line(planned, flags: list[str], message: str) -> None:
    code, out, err = planned(*flags)
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_help_needs_no_torch() -> None:
    done = run_program("-X", "importtime", "-m", "cifar_zero", "plan", "--help")
    assert done.returncode == 0
    assert "--device_memory" in done.stdout
    assert " torch\n" not in done.stderr
