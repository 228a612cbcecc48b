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


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("baseline") / "new" / "before.pt"
    assert main(["run", "--save", str(file), *SCRIPT]) == 0
    return file


@pytest.mark.parametrize(
    ("plant", "environment", "finding", "notes"),
    [
        ("", {"ATEN_CPU_CAPABILITY": "default"}, "", ["weights drift from the baseline", "environment has changed"]),
        (LOSS, {}, "step 1: the gradient of .* of its norm, from the same weights and batches", []),
        (BATCHES, {}, "step 1: the gradient of .* of its norm, from other batches", []),
        (OPTIMIZER, {}, "step 2: the last update differs from the baseline's, by .*", []),
        (LATER, {}, "", ["weights drift from the baseline: from the start of this step on"]),
    ],
)
def test_a_later_run_against_a_baseline(
    plant: str,
    environment: dict[str, str],
    finding: str,
    notes: list[str],
    baseline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The plants stand for another release of torch. The audit alone does not find them. Other kernels are no fault."""
    (tmp_path / "sitecustomize.py").write_text(plant)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    report = tmp_path / "verdict.json"
    every = ["--every", "2"] if plant == LATER else []  # the update that differs is in a step between two audited ones
    code = main(["run", "--against", str(baseline), "--json", str(report), *every, *SCRIPT, "--clip", "0"])
    engine: dict[str, Any] = json.loads(report.read_text())["engines"][0]
    found = [f"step {each['step']}: {each['text']}" for each in engine["findings"]]
    assert code == (1 if finding else 0), engine["summary"]
    assert len(found) == (1 if finding else 0)
    assert all(re.fullmatch(finding, text) for text in found)
    assert all(note in engine["summary"] for note in notes)
    assert "command has changed: tests/stepcheck/loop.py --steps 4 in the baseline" in engine["summary"]


SWEEP = """
import multiprocessing

import torch


def train(steps):
    torch.manual_seed(steps)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


for steps in (4, 3):
    process = multiprocessing.get_context("fork").Process(target=train, args=(steps,))
    process.start()
    process.join()
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
