"""`stepcheck run --save` and `--against`: what changes between two runs of a script is found where it begins."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepcheck.__main__ import main

SCRIPT = ["tests/stepcheck/loop.py", "--steps", "4"]

LOSS = """
import torch.nn.functional as F
real = F.cross_entropy
F.cross_entropy = lambda *args, **more: real(*args, **more) * 1.0001
"""
BATCHES = """
import torch
real = torch.randint
torch.randint = lambda low, high, *args, **more: real(low, high - (high == 97), *args, **more)
"""
OPTIMIZER = """
import torch
real = torch.optim.AdamW.__init__
def init(self, params, lr=0.1, **more):
    real(self, params, lr * 1.01, **more)
torch.optim.AdamW.__init__ = init
"""


LATER = """
import torch
real = torch.optim.AdamW.step
def step(self, *args, **more):
    self.count = getattr(self, "count", 0) + 1
    for group in self.param_groups:
        group["lr"] *= 1.01 if self.count == 3 else 1
    return real(self, *args, **more)
torch.optim.AdamW.step = step
"""

WEIGHTS = """
import os
os.environ["ATEN_CPU_CAPABILITY"] = "default"
"""


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("baseline") / "new" / "before.pt"
    assert main(["run", "--save", str(file), *SCRIPT]) == 0
    return file


@pytest.mark.parametrize(
    ("plant", "arguments", "code", "finding", "says"),
    [
        (LOSS, [], 1, "step 1: the gradient of .* of its norm, from the same weights and batches", []),
        (BATCHES, [], 1, "step 1: the gradient of .* of its norm, from other batches", []),
        (OPTIMIZER, [], 1, "step 2: the last update differs from the baseline's, by .*", []),
        (LATER, [], 0, "", ["weights drift from the baseline: from the start of this step on"]),
        ("", ["--steps", "7"], 0, "", ["because the baseline does not have them (first: step 5)"]),
        (WEIGHTS, [], 1, "", ["because from step 1 on, the weights differ", "environment has changed"]),
    ],
)
def test_a_later_run_against_a_baseline(
    plant: str,
    arguments: list[str],
    code: int,
    finding: str,
    says: list[str],
    baseline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The plants stand for another release of torch. The audit alone does not find them."""
    (tmp_path / "sitecustomize.py").write_text(plant)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = tmp_path / "verdict.json"
    every = ["--every", "2"] if plant == LATER else []  # the update that differs is in a step between two audited ones
    flags = ["--against", str(baseline), "--json", str(report), *every]
    ended_with = main(["run", *flags, *SCRIPT, "--clip", "0", *arguments])
    engine: dict[str, Any] = json.loads(report.read_text())["engines"][0]
    found = [f"step {each['step']}: {each['text']}" for each in engine["findings"]]
    assert ended_with == code, engine["summary"]
    assert len(found) == (1 if finding else 0)
    assert all(re.fullmatch(finding, text) for text in found)
    assert all(text in engine["summary"] for text in says)
    assert engine["summary"].count("against the baseline") <= 1
    assert "command has changed: tests/stepcheck/loop.py --steps 4 in the baseline" in engine["summary"]


SWEEP = """
import subprocess, sys

for steps in ("4", "3"):
    subprocess.run([sys.executable, "tests/stepcheck/loop.py", "--steps", steps, "--accumulate", steps], check=True)
"""


def test_the_trainings_of_a_sweep_are_compared_one_by_one(tmp_path: Path):
    """Each process of the script trains one engine."""
    script, file, report = tmp_path / "sweep.py", tmp_path / "before.pt", tmp_path / "verdict.json"
    script.write_text(SWEEP)
    assert main(["run", "--save", str(file), str(script)]) == 0
    assert main(["run", "--against", str(file), "--json", str(report), str(script)]) == 0
    engines: list[dict[str, Any]] = json.loads(report.read_text())["engines"]
    assert [(each["steps"], each["not_judged"], each["notes"]) for each in engines] == [(4, {}, {}), (3, {}, {})]


def test_a_missing_baseline_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["run", "--against", "missing.pt", *SCRIPT]) == 2
    assert "--against: missing.pt is not a file" in capsys.readouterr().err
