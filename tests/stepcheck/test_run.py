"""`stepcheck run` as a user runs it: on a script that knows nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stepcheck import __all__ as public_names
from stepcheck.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tests/stepcheck/loop.py"

PLANT = """
import torch
real = torch.optim.AdamW.step
def step(self, *args, **more):
    real(self, *args, **more)
    self.param_groups[0]["params"][1].data.mul_(1.01)
torch.optim.AdamW.step = step
"""


def stepcheck(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "stepcheck", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_healthy_script_keeps_its_exit_code_and_output(tmp_path: Path) -> None:
    report, junit = tmp_path / "new" / "verdict.json", tmp_path / "junit.xml"
    done = stepcheck("run", "--json", str(report), "--junit", str(junit), SCRIPT, "--accumulate", "2", "--clip", "0.5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")
    (engine,) = json.loads(report.read_text())["engines"]
    assert engine["steps"] == 3
    assert engine["coverage"] == 1
    assert engine["findings"] == []
    assert f"stepcheck: plain PyTorch: {engine['summary']}" in done.stdout
    assert ElementTree.parse(junit).getroot().attrib["failures"] == "0"


@pytest.mark.distributed
def test_the_first_fault_ends_all_ranks(tmp_path: Path) -> None:
    """A sitecustomize.py of the user's runs too: here it plants the fault."""
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    report, junit = tmp_path / "verdict.json", tmp_path / "junit.xml"
    launcher = ["torchrun", "--standalone", "--nproc_per_node", "2"]
    options = ["--json", str(report), "--junit", str(junit)]
    done = stepcheck("run", *options, *launcher, SCRIPT, "--engine", "ddp", "--steps", "50", path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "stepcheck: step 1: the update of conv.weight is off by" in done.stdout
    (engine,) = json.loads(report.read_text())["engines"]
    assert engine["findings"][0]["step"] == 1
    (failure,) = ElementTree.parse(junit).getroot().iter("failure")
    assert "conv.weight" in failure.attrib["message"]
    assert "torchrun" in str(failure.text)


@pytest.mark.distributed
def test_the_ranks_that_a_script_starts_are_audited(tmp_path: Path) -> None:
    """This repository's train.py starts its ranks itself, and has a training loop of its own."""
    pytest.importorskip("lightning")
    flags = ["--data.source", "synthetic", "--data.synthetic_size", "64", "--data.root", str(tmp_path), "--out"]
    flags += [str(tmp_path), "--strategy", "deepspeed_stage_2", "--devices", "2", "--accelerator", "cpu"]
    flags += ["--batch_size", "8", "--accumulate", "2", "--max_steps", "3", "--test_figures", "false"]
    done = stepcheck("run", "--json", str(tmp_path / "verdict.json"), "train.py", *flags)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (engine,) = json.loads((tmp_path / "verdict.json").read_text())["engines"]
    assert (engine["steps"], engine["coverage"]) == (3, 1)
    assert engine["engine"].endswith("ZeRO 2, float32, 2 ranks")


def test_keep_going_lets_the_script_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["run", "--keep_going", str(ROOT / SCRIPT)]) == 1
    printed = capfd.readouterr().out
    assert "loss " in printed
    assert "3 steps audited" in printed


@pytest.mark.parametrize(("source", "code"), [("", 1), ("raise SystemExit(7)", 7)])
def test_a_script_without_an_audited_step_is_no_success(
    source: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(source)
    assert main(["run", str(tmp_path / "script.py")]) == code
    assert "no step was audited" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "SCRIPT"),
        (["nowhere.py"], "nowhere.py is not a file"),
        (["nolauncher", "train.py"], "nolauncher"),
        (["--every", "0", SCRIPT], "--every"),
        (["--json", ".", SCRIPT], "--json"),
        (["--unknown", SCRIPT], "--unknown"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_the_library_knows_nothing_of_the_other_package_and_starts_without_torch() -> None:
    """No module of stepcheck imports what only the other package needs, and the command parses without torch."""
    for name in public_names:  # a module of this name would hide it
        assert not (ROOT / "stepcheck" / f"{name}.py").exists(), name
    unwanted = ("cifar_zero", "cifar_module", "datamodule", "lightning", "torchvision", "jsonargparse", "rich")
    for path in (ROOT / "stepcheck").rglob("*.py"):
        words = [
            line.split() for line in path.read_text().splitlines() if line.lstrip().startswith(("import ", "from "))
        ]
        imported = {word[1].split(".")[0] for word in words}
        if path.is_relative_to(ROOT / "stepcheck" / "lightning"):
            imported -= {"lightning", "jsonargparse"}
        if path.relative_to(ROOT / "stepcheck").as_posix() in ("accept/frameworks.py", "script/check.py"):
            imported -= {"lightning"}
        assert not imported.intersection(unwanted), path
    code = "import sys, stepcheck.__main__, stepcheck.attach; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
