"""plan.py as a user runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import exits
import plan
from tests.helpers import ROOT, run_program

LARGE = ["--parameters", "10e9", "--optimizer", "adam", "--precision", "bf16-mixed", "--device_memory", "80GB"]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs it in this process; gives the exit code and what it printed."""

    def run(*flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["plan.py", *flags])
        code = exits.guarded(plan.main)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_thirteen_billion_parameters_take_little_memory() -> None:
    """The peak of the process, which is mostly torch: 0.84 GB, where the weights alone would be 52."""
    flags = ["--model", "vit_13b", "--devices", "8", "--device_memory", "80GB", "--optimizer", "adamw", "--json"]
    code = "import pathlib, runpy, sys; sys.argv = sys.argv[1:]\n"
    code += "try: runpy.run_path('plan.py', run_name='__main__')\n"
    # Linux's ru_maxrss would be that of pytest, from which the process was forked.
    code += (
        "finally: print(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan.py", *flags],
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


def test_a_table_for_people(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("80", "140"):
        monkeypatch.setenv("COLUMNS", columns)
        code, out, _ = planned("--model", "vit_tiny", "--devices", "2", "--device_memory", "80GB", "--batch_size", "64")
        assert code == 0
        assert "vit_tiny, 5,362,378 parameters, sgd, 32-true, 2 ranks, micro-batches of 32 images" in out
        assert out.endswith(
            "baseline: 0.38 of the 72.0 GB that a rank may take\n"
            "python train.py --model vit_tiny --devices 2 --batch_size 64 --strategy baseline\n"
        )
        table = out.split("device: the most")[0]
        assert "…" not in table
        assert len([line for line in table.splitlines() if " yes " in line]) == 12


def test_model_states_over_numbers_of_devices(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    code, out, _ = planned(*LARGE, "--table", "--devices", "16")
    assert code == 0
    (row,) = [line.split() for line in out.splitlines() if line.split()[:1] == ["deepspeed_stage_2"]]
    # 2 + 14/N bytes a parameter, and 6/N more in the update, or 4 as it is built; the star is for what fits.
    assert row[1:4] == ["220", "70.0*", "40.0*"]
    assert "deepspeed_stage_1" in out.splitlines()[-1]


def test_several_machines_are_started_by_torchrun(planned) -> None:
    code, out, _ = planned("--num_nodes", "2", "--devices", "4", "--device_memory", "80GB", "--batch_size", "8")
    assert code == 0
    assert out.splitlines()[-1].startswith("torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d")


def test_what_several_machines_send(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 200 Mbit/s the 21.4 MB of an all-reduce among two ranks take 0.86 seconds."""
    monkeypatch.setenv("COLUMNS", "100")
    flags = ["--model", "vit_tiny", "--num_nodes", "2", "--batch_size", "8", "--accelerator", "cpu"]
    code, out, _ = planned(*flags, "--bandwidth", "200Mbit/s", "--step_time", "0.2")
    assert code == 0
    table = out.split(" communication ")[1]
    assert "…" not in table
    rows = {row[0]: row[1:] for row in map(str.split, table.splitlines()) if len(row) == 5}
    assert rows["ddp"] == ["21.4", "1", "0.858", "1.06"]
    assert rows["stage_2"] == ["32.2", "2", "1.29", "1.49"]
    assert "tensor_parallel" not in rows
    _, out, _ = planned(*flags)
    assert "sent, MB a rank and step  calls \n" in out
    _, out, _ = planned(*flags, "--json", "--bandwidth", "200Mbit/s")
    (row,) = [row for row in json.loads(out)["strategies"] if row["strategy"] == "ddp"]
    assert row["traffic"] == {"sent_bytes": 21449512, "collectives": 1}
    assert row["communication_seconds"] == pytest.approx(21449512 / 25e6)


def test_what_this_machine_lacks_refuses_nothing_of_another(planned, tmp_path: Path) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text("batch_size: 4\n")
    flags = ["--config", str(recipe), "--optimizer", "adam8bit", "--device_memory", "80GB"]
    code, out, _ = planned(*flags, "--json")
    assert code == 0
    assert json.loads(out)["micro_batch"] == 4  # the default, but said
    assert json.loads(out)["recommended"] == "baseline"
    if importlib.util.find_spec("bitsandbytes") is None:
        assert "needs bitsandbytes" in json.loads(out)["strategies"][0]["wanted"]


def test_nothing_fits(planned) -> None:
    code, out, _ = planned(*LARGE[:-1], "1GiB", "--json")
    assert code == 1
    assert json.loads(out)["recommended"] is None
    assert json.loads(out)["reason"].endswith("GB of the device, where it may take 0.97; take more devices")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "vit_lage"], "unknown model 'vit_lage': did you mean vit_large?"),
        (["--devices", "3", "--batch_size", "64"], "the nearest that divide: 63 or 66"),
        (["--device_memory", "80PB"], "--device_memory 80PB: give a size such as 80GB"),
        (["--parameters", "many"], "--parameters many: give a number such as 100e9"),
        (["--step_time", "1"], "--step_time requires --bandwidth: it is the time of a step without communication"),
        (["--step_time", "0", "--bandwidth", "1GB"], "--step_time must be a number of seconds above 0"),
        (["--bandwidth", "100Gb"], "--bandwidth 100Gb: give a rate such as 100Gbit/s"),
        (["--table", "--bandwidth", "1GB"], "--table shows memory: it cannot be combined with --bandwidth"),
        (["--device_memry", "80GB"], "unknown option --device_memry"),
        (["--device_memory", ""], "--device_memory : give a size such as 80GB"),
        (["--host_memory", "0.0000000001"], "--host_memory 0.0000000001: give a size"),
        (
            ["--parameters", "1e9", "--lora.rank", "4"],
            "--lora.rank: of a network of --parameters nothing else is known",
        ),
        (["--lora.rank", "-1", "--lora.target", "fc1"], "--lora.rank must be at least 1, not -1"),
        (["--lora.rank", "4"], "--lora.rank needs --lora.target"),
        (["--precision", "16-mixed", "--accelerator", "cpu"], "--precision 16-mixed needs a GPU"),
        (["--ds_config", "some.json"], "--ds_config: a plan is of named strategies"),
        (["--model", "vit_tiny", "--trainable", "nothing.*"], "--trainable nothing.* is no parameter of the network"),
    ],
)
def test_mistakes_are_told_in_one_line(planned, flags: list[str], message: str) -> None:
    code, out, err = planned(*flags)
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_help_needs_no_torch() -> None:
    done = run_program("-X", "importtime", "plan.py", "--help")
    assert done.returncode == 0
    assert "--device_memory" in done.stdout
    assert " torch\n" not in done.stderr
